from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from kit.run_logs import RunLog, eventful, finished

from trainer_kit.report import FORMATS, write_report

VOID = {"br", "hr", "link", "meta", "wbr"}
EVIL = """</title></style></svg><script>alert("1")</script><img src=x onerror='alert(2)'>&lt;$\\frac$\u202e\x00\ud800"""


class Document(HTMLParser):
    """A page, checked while it is read: elements are closed in order, and no name stands for two of them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if (name := attributes.get("id")) is not None:
            assert name not in self.ids
            self.ids.add(name)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    finished(folder / "a")
    eventful(folder / "b")
    return folder


@pytest.fixture(scope="module")
def pages(runs: Path) -> dict[str, str]:
    made = [write_report(runs / "b"), write_report(runs / "a", runs / "two.html", compare=[runs / "b"])]
    return {path.stem: path.read_text(encoding="utf-8") for path in made}


@pytest.mark.parametrize("name", ["report", "two"])
def test_a_page_is_whole_and_needs_nothing_else(pages: dict[str, str], name: str) -> None:
    text = pages[name]
    document = Document(text)
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert not document.all("script")
    policy = {each.get("content") for each in document.all("meta") if "http-equiv" in each}
    assert policy == {"default-src 'none'; style-src 'unsafe-inline'; img-src data:"}
    assert not re.search(r"https?:|//\w|@import|@font-face", text)
    references = {match for match in re.findall(r'(?:url\(|href=")([^")]*)', text) if match != "data:,"}
    assert references
    assert {reference.removeprefix("#") for reference in references} <= document.ids
    assert not re.search(r"#fe[0-9a-f]{2}ef", text)  # colours that no role was put in for
    assert "DejaVu" not in text


@pytest.mark.parametrize("name", ["report", "two"])
def test_whoever_cannot_see_it_is_told(pages: dict[str, str], name: str) -> None:
    document = Document(pages[name])
    drawings = document.all("svg")
    plots = [each for each in drawings if each.get("role") == "img"]
    assert all(each.get("aria-hidden") == "true" for each in drawings if each not in plots)
    labels = [str(each["aria-label"]) for each in plots]
    assert all(re.search(r"\d", label) and len(label) > 40 for label in labels)
    assert any("last 3.196 at step 2,000" in label for label in labels)
    figures = len(document.all("figure"))
    assert len(set(labels)) == figures  # wide ones are there in two sizes
    assert len(document.all("figcaption")) == figures
    assert sum(each.get("scope") == "row" for each in document.all("th")) > 100
    assert len(document.all("caption")) == len(document.all("table")) >= figures
    assert len(document.all("main")) == len(document.all("h1")) == len(document.all("nav")) == 1
    headings = [tag for tag, _ in document.elements if re.fullmatch(r"h\d", tag)]
    assert all(int(after[1]) <= int(before[1]) + 1 for before, after in itertools.pairwise(headings))
    assert document.elements[document.elements.index(("body", {})) + 1][0] == "a"  # "Skip to the report"


def test_tables_that_a_phone_takes_apart_stay_tables(pages: dict[str, str]) -> None:
    """Browsers take an element that is no table cell any more for none, unless it says that it is one."""
    found = re.findall(r'<table class="stacked".*?</table>', pages["two"], re.S)
    assert found
    for table in found:
        elements = Document(table).elements
        assert all("role" in attributes for tag, attributes in elements if tag in {"table", "thead", "tbody", "tr"})
        roles = {attributes.get("role") for tag, attributes in elements if tag in ("th", "td")}
        assert roles == {"columnheader", "rowheader", "cell"}


def test_one_run_is_told_as_a_whole(pages: dict[str, str]) -> None:
    texts = Document(pages["report"]).texts
    for expected in (
        "finished", "2 restarts, 4 min 30 s lost, 8 min 35 s down", "step 610 took 40 s: the file system hangs",
        "learning_rate", "NVIDIA H100 80GB HBM3", "activations", "36.4 GiB",
        "31 records of steps that were taken again after a restart or rollback are not in the curves.",
    ):  # fmt: skip
        assert expected in texts


def test_several_runs_are_told_side_by_side(pages: dict[str, str]) -> None:
    document = Document(pages["two"])
    assert "a and b" in document.texts
    assert "Arguments that differ" in document.texts
    section = re.search(r'<section id="arguments".*?</section>', pages["two"], re.S)
    assert section is not None
    assert "0.0003" in section[0]
    assert "0.0006" in section[0]
    assert "num_train_epochs" not in section[0]


def test_texts_of_the_log_stay_texts(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "<b>$x^2$", **{EVIL: EVIL, "metric_for_best_model": f"eval_{EVIL}"})
    log.start(environment={EVIL: EVIL}, trainer_kit=EVIL)
    for _ in range(3):
        log.log(**{EVIL: 1.0, f"seconds/{EVIL}": 1.0, f"seconds/callback/{EVIL}": 1.0, f"anatomy/{EVIL}": 1.0})
        log.evaluate(**{f"eval_{EVIL}": 0.5, f"eval_{EVIL}_loss": 1.0, "eval_note": EVIL})
        log.write("warning", message=EVIL, source=EVIL)
    log.write("exception", type=EVIL, message=EVIL)
    other = finished(tmp_path / EVIL.replace("/", "|").replace("\x00", "").encode("utf-8", "replace").decode())
    for page in (write_report(log.path), write_report(log.path, tmp_path / "two.html", compare=[other])):
        text = page.read_text(encoding="utf-8")
        document = Document(text)
        assert not document.all("script")
        assert not document.all("img")
        assert not any(name.startswith("on") for _, attributes in document.elements for name in attributes)
        assert any('<script>alert("1")</script>' in each for each in document.texts)
        assert not {"\x00", "\u202e"} & set(text)


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    RunLog(tmp_path).start()
    document = Document(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "no end recorded" in document.texts
    assert not document.all("figure")


def test_a_log_that_was_cut_is_shown_and_told(tmp_path: Path) -> None:
    folder = finished(tmp_path)
    lines = (folder / "log.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "log.jsonl").write_bytes(b"".join(lines[:100]) + lines[100][:30])
    told = "Line 101 of log.jsonl was cut short when the process ended, and left out; all others are shown."
    assert told in Document(write_report(folder).read_text(encoding="utf-8")).texts


@pytest.mark.slow
def test_values_that_are_not_finite_are_marked(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.start()
    for loss in (2.0, 1.0, "nan", "inf"):
        log.log(loss=loss)
    labels = [str(each.get("aria-label")) for each in Document(write_report(tmp_path).read_text()).all("svg")]
    assert any("last 1 at step 20" in label and "2 values not finite" in label for label in labels)


@pytest.mark.parametrize("format", FORMATS)
def test_evaluations_alone(tmp_path: Path, format: str) -> None:
    log = RunLog(tmp_path)
    log.evaluate(eval_loss=1.25)
    path = write_report(tmp_path, format=format)
    if format != "png":
        shown = path.read_text(encoding="utf-8")
        assert "no training" in shown
        assert "1.25" in shown

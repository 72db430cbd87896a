"""`PushToHub`: the newest model of a run in a repository of the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_kit.callback import Callback
from trainer_kit.report.card import model_card
from trainer_kit.utils.run_log import NAME

if TYPE_CHECKING:
    from trainer_kit.run import Run

_logger = logging.getLogger("trainer_kit")
_CHECKPOINT = "last-checkpoint"
_STAGED = ".push-"
_NOT_OF_THE_MODEL = ("state", "manifest.json", "arguments.json")
_WEIGHTS = re.compile(r"[^/]*\.safetensors(\.index\.json)?|last-checkpoint/.*")


class PushToHub(Callback):
    """Push each checkpoint's model to the Hugging Face Hub while training continues, and the final one at the end.

    The repository holds the weights, the configuration and the tokenizer of the newest checkpoint, and a model card
    made from the run; with `load_best_model_at_end` those of the best one at the end. Each push is one commit.
    Checkpoints that are saved during a push are skipped. A push that fails is warned of, and the next checkpoint is
    pushed again: a network that is down does not end a training.

    Args:
        repo_id: Name of the repository, such as "me/my-model"; created if missing.
        private: Whether a new repository is private; None: as the account or organization has it. With True, nothing is
            pushed to a repository that exists and is public.
        token: Token with the right to write; None: the one that `hf auth login` stored, or that of `HF_TOKEN`.
        revision: Branch to push to; None: the main one.
        every_save: Whether to push each checkpoint's model; False: only the final one.
        checkpoints: Whether to push the whole newest checkpoint too, as the folder "last-checkpoint", from which
            another machine can resume.
        **metadata: Fields of the model card, such as `license="mit"`; see `trainer_kit.report.card.model_card`.

    Raises:
        ValueError: When training begins, if the Hub refuses the name or the token, or the repository is public and
            must be private.
    """

    priority = 210  # after Report, when the log is complete

    def __init__(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        every_save: bool = True,
        checkpoints: bool = False,
        **metadata: Any,
    ) -> None:
        from huggingface_hub import HfApi

        self.repo_id = repo_id
        self._api = HfApi(token=token, library_name="trainer_kit")
        self._private = private
        self._revision = revision
        self._every_save = every_save
        self._checkpoints = checkpoints
        self._metadata = metadata
        self._has_repo = False
        self._thread: ThreadPoolExecutor | None = None
        self._push: Future[None] | None = None
        self._pushed: Path | None = None
        self._newest: Path | None = None

    def on_train_begin(self, run: Run) -> None:
        self._push = self._pushed = None
        resumed = Path(run.args.output_dir) / f"checkpoint-{run.state.step}"
        self._newest = resumed if run.state.step and resumed.is_dir() else None  # it may not have been pushed
        run.strategy.collectives.on_main(self._check_repo)
        if run.strategy.is_main:
            for left in Path(run.args.output_dir).glob(f"{_STAGED}*"):  # of a run that was killed
                shutil.rmtree(left, ignore_errors=True)

    def on_save(self, run: Run, directory: Path) -> None:
        self._newest = directory
        if run.strategy.is_main:
            if directory == self._pushed:  # saved again, after a rollback
                self._pushed = None
            if self._every_save and (self._push is None or self._push.done()):
                self._begin(run, directory)

    def on_exit(self, run: Run) -> None:
        if not run.strategy.is_main:
            return
        final = self._final(run)
        if final is None:
            _logger.warning("nothing was pushed to %s: the run saved no checkpoint; see save_strategy", self.repo_id)
            return
        self._wait()
        self._begin(run, final)
        self._wait()
        self._close()
        if self._pushed == final:
            _logger.info("pushed to %s/%s", self._api.endpoint, self.repo_id)

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._close()

    def _final(self, run: Run) -> Path | None:
        """Return the checkpoint of the model that the run ends with."""
        best = Path(run.args.output_dir) / f"checkpoint-{run.state.best_step}"
        return best if run.args.load_best_model_at_end and best.is_dir() else self._newest

    def _make_repo(self) -> str | None:
        """Create the repository, or return why nothing may be pushed to the one that exists."""
        self._api.create_repo(self.repo_id, private=self._private, exist_ok=True)
        if self._revision is not None:
            self._api.create_branch(self.repo_id, branch=self._revision, exist_ok=True)
        if self._private and not self._api.repo_info(self.repo_id).private:
            return f"repo_id={self.repo_id!r} is public; make it private in its settings, or leave private=True out"
        self._has_repo = True
        return None

    def _check_repo(self) -> None:
        """Create the repository; raise an error if the Hub refuses that, and warn if it cannot be reached."""
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            refusal = self._make_repo()
        except (HFValidationError, HfHubHTTPError) as error:
            status = getattr(getattr(error, "response", None), "status_code", 400)
            if status >= 500:
                self._warn(error)
                return
            raise ValueError(
                f"the Hub does not let this run push to repo_id={self.repo_id!r}: {_in_a_line(error)}; correct the "
                "name, or log in with `hf auth login` and a token that may write"
            ) from error
        except Exception as error:  # whatever the client raises without a network
            self._warn(error)
        else:
            if refusal is not None:
                raise ValueError(refusal)

    def _begin(self, run: Run, directory: Path) -> None:
        """Begin the push of a checkpoint, whose files may be removed or replaced meanwhile.

        Of the one that was pushed last, only the model card is pushed again.
        """
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="push-to-hub")
        staged = Path(tempfile.mkdtemp(prefix=_STAGED, dir=run.args.output_dir))
        try:
            if directory != self._pushed:
                _stage(directory, staged, self._checkpoints)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        log = Path(run.args.output_dir) / NAME
        metadata = {"model_name": self.repo_id.rpartition("/")[2]} | self._metadata
        self._push = self._thread.submit(self._commit, staged, directory, log, metadata)

    def _commit(self, staged: Path, directory: Path, log: Path, metadata: dict[str, Any]) -> None:
        """Push the staged files as one commit, and delete weights in the repository that are not among them."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        try:
            if not self._has_repo and (refusal := self._make_repo()) is not None:
                raise ValueError(refusal)
            files = {path.relative_to(staged).as_posix(): path for path in staged.rglob("*") if path.is_file()}
            contents: dict[str, Any] = dict(files)
            if log.exists():
                step = int(directory.name.rpartition("-")[2])
                contents["README.md"] = model_card(log, step, **metadata).encode()
            there = self._api.list_repo_files(self.repo_id, revision=self._revision)
            stale = [name for name in there if files and _WEIGHTS.fullmatch(name) and name not in contents]
            adds = [CommitOperationAdd(name, content) for name, content in contents.items()]
            with _without_bars():
                self._api.create_commit(
                    self.repo_id,
                    [*adds, *(CommitOperationDelete(name) for name in stale)],
                    commit_message=f"Model of {directory.name}",
                    revision=self._revision,
                )
        except Exception as error:  # a failed push must not fail the run
            self._warn(error)
        else:
            self._pushed = directory
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def _warn(self, error: Exception) -> None:
        _logger.warning("the model was not pushed to %s: %s; training continues", self.repo_id, _in_a_line(error))

    def _wait(self) -> None:
        if self._push is not None:
            self._push.result()

    def _close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._thread = None


def _in_a_line(error: BaseException) -> str:
    """Return an error and what caused it in one line, without the client's advice after the first one."""
    first, answer = str(error).partition("\n")[0], getattr(error, "server_message", None)
    line = f"{type(error).__name__}: {first}" + (f": {answer}" if answer and answer not in first else "")
    cause = error.__cause__
    is_new = cause is not None and str(cause).partition("\n")[0] not in line
    return f"{line} ({_in_a_line(cause)})" if cause is not None and is_new else line


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the client's progress bars, which would break that of the training."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _stage(directory: Path, staged: Path, whole: bool) -> None:
    """Link, or copy, the files of a checkpoint's model into a folder, and with `whole` those of the checkpoint."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:  # a file system without links
            shutil.copyfile(source, target)

    def leave_out(folder: str, names: list[str]) -> set[str]:
        return {*_NOT_OF_THE_MODEL} if Path(folder) == directory else set()

    shutil.copytree(directory, staged, ignore=leave_out, copy_function=link, dirs_exist_ok=True)
    if whole:
        shutil.copytree(directory, staged / _CHECKPOINT, copy_function=link)

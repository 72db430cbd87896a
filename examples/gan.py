"""Train a GAN: two models and two optimizers in a loop of your own with `Accelerator`, resumed bit for bit.

    python examples/gan.py                                                  about a minute on 2 CPU cores
    trainer-kit launch --num-processes 2 examples/gan.py                    the same training on two processes
    python examples/gan.py --resume                                         resumes an interrupted run

A generator and a discriminator made of convolutions, as in a DCGAN, learn to draw the digits that scikit-learn ships.
The discriminator steps first, on real images and on the generator's images without their graph; then the
generator steps. A checkpoint holds both models, both optimizers, the position in the data and the random state.
Needs scikit-learn.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from trainer_kit import Accelerator, set_seed
from trainer_kit.accelerator import ProjectConfiguration

BATCH_SIZE = 64
NOISE = 16
RATE = 2e-3
CHECKPOINT_STEPS = 10


def make_generator() -> nn.Module:
    """Return a model that draws images of 8 x 8 pixels from noise of shape [batch, NOISE, 1, 1]."""
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 64, 2), nn.BatchNorm2d(64), nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1), nn.Sigmoid(),
    )  # fmt: skip


def make_discriminator() -> nn.Module:
    """Return a model whose output is positive for images that it takes for real."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 4, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Dropout(0.2),
        nn.Conv2d(32, 64, 4, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(256, 1),
    )  # fmt: skip


def judge(discriminator: nn.Module, images: torch.Tensor, is_real: bool) -> torch.Tensor:
    """Return the loss of a discriminator that should find the images real, or not real."""
    logits = discriminator(images)
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))


def train(options: argparse.Namespace) -> dict[str, float]:
    """Train; return the results."""
    set_seed(1)
    project = ProjectConfiguration(options.output_dir, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(split_batches=True, project_config=project)
    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
    loader: Any = DataLoader(TensorDataset(images), BATCH_SIZE, shuffle=True, drop_last=True)
    models = make_generator(), make_discriminator()
    optimizers = [torch.optim.Adam(model.parameters(), lr=RATE, betas=(0.5, 0.999)) for model in models]
    generator, discriminator, drawing, judging, loader = accelerator.prepare(*models, *optimizers, loader)
    if options.resume:
        accelerator.load_state()

    for epoch in range(loader.epoch, options.epochs):
        for step, (real,) in enumerate(loader):  # after load_state() it continues where it was
            drawn = generator(torch.randn(len(real), NOISE, 1, 1, device=accelerator.device))
            judging.zero_grad()
            judging_loss = judge(discriminator, real, is_real=True) + judge(
                discriminator, drawn.detach(), is_real=False
            )
            accelerator.backward(judging_loss)
            judging.step()
            drawing.zero_grad()
            drawing_loss = judge(discriminator, drawn, is_real=True)
            accelerator.backward(drawing_loss)
            drawing.step()
            if step % CHECKPOINT_STEPS == CHECKPOINT_STEPS - 1:
                accelerator.save_state()
        accelerator.print(f"epoch {epoch}: discriminator {judging_loss:.3f}, generator {drawing_loss:.3f}")
    accelerator.save_model(generator, f"{options.output_dir}/generator")
    accelerator.print(f"the folder {options.output_dir} has the model in generator/, the checkpoints in checkpoints/")
    states = [accelerator.get_state_dict(model) for model in (generator, discriminator)]
    sums = [sum(float(value.double().abs().sum()) for value in state.values()) for state in states]
    return {"generator": sums[0], "discriminator": sums[1]}


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="runs/gan", help="checkpoints and the generator (%(default)s)")
    parser.add_argument("--epochs", type=int, default=30, help="(%(default)s)")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint there")
    parser.add_argument("--short", action="store_true", help="1 epoch, to see that everything works")
    options = parser.parse_args(argv)
    if options.short:
        options.epochs = 1
    return train(options)


if __name__ == "__main__":
    main()

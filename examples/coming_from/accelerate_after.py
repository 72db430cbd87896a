"""A loop of one's own, with trainer_kit: it reads digits.

Run it with `trainer-kit launch examples/coming_from/accelerate_after.py`.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from trainer_kit.accelerator import Accelerator, DataLoaderConfiguration
from trainer_kit.accelerator.utils import ProjectConfiguration, set_seed

EPOCHS = 3


def main(output_dir: str) -> dict[str, float]:
    set_seed(0)
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=True
        ),
        project_config=ProjectConfiguration(
            output_dir, automatic_checkpoint_naming=True, total_limit=2
        ),
    )
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    samples = TensorDataset(images, torch.tensor(digits.target))
    train_set, test_set = random_split(samples, [1397, 400])
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=64)

    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(
        optimizer, 1.0, 0.0, EPOCHS * len(train_loader) // 2
    )
    model, optimizer, train_loader, test_loader, schedule = (
        accelerator.prepare(
            model, optimizer, train_loader, test_loader, schedule
        )
    )

    for epoch in range(EPOCHS):
        model.train()
        for batch, labels in train_loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.save_state()

        model.eval()
        right = 0
        for batch, labels in test_loader:
            with torch.no_grad():
                guesses = model(batch).argmax(-1)
            guesses, labels = accelerator.gather_for_metrics(
                (guesses, labels)
            )
            right += int((guesses == labels).sum())
        accelerator.print(f"epoch {epoch}: {right / len(test_set):.1%}")
    accelerator.save_model(model, f"{output_dir}/model")
    return {
        "train_loss": loss.item(),
        "eval_accuracy": right / len(test_set),
    }


if __name__ == "__main__":
    print(main("runs/after"))

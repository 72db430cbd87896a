"""A keras model that reads digits, on the backend torch.

Run it with `KERAS_BACKEND=torch python examples/coming_from/keras_before.py`.
"""

from __future__ import annotations

import keras
from sklearn.datasets import load_digits


def main(output_dir, shuffle=True):
    keras.utils.set_random_seed(0)
    digits = load_digits()
    images = (digits.data / 16).astype("float32")
    model = keras.Sequential(
        [
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3, global_clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(
            from_logits=True
        ),
        metrics=["accuracy"],
    )
    model.fit(
        images[:1397],
        digits.target[:1397],
        batch_size=32,
        epochs=3,
        shuffle=shuffle,
        validation_data=(images[1397:], digits.target[1397:]),
        callbacks=[
            keras.callbacks.ModelCheckpoint(
                f"{output_dir}/best.keras",
                monitor="val_accuracy",
                save_best_only=True,
            )
        ],
    )
    loss, accuracy = model.evaluate(images[1397:], digits.target[1397:])
    return {"eval_loss": loss, "eval_accuracy": accuracy}


if __name__ == "__main__":
    print(main("runs/before"))

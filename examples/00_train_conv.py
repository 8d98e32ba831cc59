"""Train a small convolutional network in this process: which way does the bar lie?

python examples/00_train_conv.py
"""

import numpy as np

import aiograd as ag

SIZE, SAMPLES, BATCH = 16, 1024, 32


def bars(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Noisy images with one bar each: across, down, or along a diagonal."""
    labels = rng.integers(0, 3, SAMPLES)
    images = 0.7 * rng.normal(size=(SAMPLES, 1, SIZE, SIZE))
    steps = np.arange(6)
    for image, label in zip(images[:, 0], labels, strict=True):
        row, column = rng.integers(0, SIZE - 6, 2)
        image[row + steps * (label != 0), column + steps * (label != 1)] += 2.0
    return images.astype(np.float32), labels


def main() -> None:
    rng = np.random.default_rng(1)
    images, labels = bars(rng)
    model = ag.nn.Sequential(
        ag.nn.Conv2d(1, 8, 5, padding=2, generator=rng),
        ag.nn.ReLU(),
        ag.nn.MaxPool2d(2),
        ag.nn.Conv2d(8, 16, 3, padding=1, generator=rng),
        ag.nn.ReLU(),
        ag.nn.MaxPool2d(8),
        ag.nn.Flatten(),
        ag.nn.Linear(16, 3, generator=rng),
    ).float()
    print(model)
    optimizer = ag.optim.Adam(model.parameters(), lr=3e-3)
    loss_of = ag.nn.CrossEntropyLoss()
    train, test = slice(0, 896), slice(896, None)
    for epoch in range(6):
        total = 0.0
        order = rng.permutation(train.stop)
        for rows in ag.progress(np.split(order, len(order) // BATCH), f"epoch {epoch}"):
            optimizer.zero_grad()
            loss = loss_of(model(images[rows]), labels[rows])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        with ag.no_grad():
            right = model(images[test]).numpy().argmax(axis=1) == labels[test]
        print(f"epoch {epoch}: loss {total / len(order):.3f}, {right.mean():.0%} right")


if __name__ == "__main__":
    main()

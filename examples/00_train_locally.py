"""Train a small network in this process: no workers yet, only tensors and autograd.

python examples/00_train_locally.py
"""

import time

import numpy as np

import aiograd as ag

CLASSES, PIXELS, SAMPLES, BATCH = 10, 28 * 28, 4096, 64


def digits(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Images the size of MNIST: a blurred pattern per class, under noise."""
    patterns = rng.normal(size=(CLASSES, PIXELS))
    labels = rng.integers(0, CLASSES, SAMPLES)
    images = patterns[labels] + 9.0 * rng.normal(size=(SAMPLES, PIXELS))
    return images.astype(np.float32), labels


def main() -> None:
    rng = np.random.default_rng(0)
    images, labels = digits(rng)
    model = ag.nn.Sequential(
        ag.nn.Linear(PIXELS, 128, generator=rng),
        ag.nn.ReLU(),
        ag.nn.Dropout(0.2, generator=rng),
        ag.nn.Linear(128, CLASSES, generator=rng),
    ).float()
    print(model)
    optimizer = ag.optim.Adam(model.parameters(), lr=1e-3)
    schedule = ag.optim.CosineAnnealingLR(optimizer, T_max=5)
    loss_of = ag.nn.CrossEntropyLoss()
    train, test = slice(0, 3584), slice(3584, None)

    for epoch in range(5):
        start, total = time.perf_counter(), 0.0
        order = rng.permutation(train.stop)
        for rows in ag.progress(np.split(order, len(order) // BATCH), f"epoch {epoch}"):
            optimizer.zero_grad()
            loss = loss_of(model(images[rows]), labels[rows])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        schedule.step()

        model.eval()
        with ag.no_grad():
            right = model(images[test]).numpy().argmax(axis=1) == labels[test]
        model.train()
        took = time.perf_counter() - start
        mean = total / len(order)
        print(f"epoch {epoch}: loss {mean:.3f}, {right.mean():.0%} right, {took:.2f} s")


if __name__ == "__main__":
    main()

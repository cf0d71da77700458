#!/usr/bin/env python3
"""The losses of examples/train_text as a picture: plot_loss.py losses.csv losses.png"""

import csv
import pathlib
import sys


def read_losses(path: pathlib.Path) -> tuple[dict[int, float], dict[int, float], float]:
    """Training and validation losses by the number of tokens seen, and the bigram table's. Of a step that was taken
    again after resuming, the last counts."""
    training, validation, bigram = {}, {}, float("nan")
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            tokens = int(row["tokens"])
            if row["validation_loss"]:
                validation[tokens] = float(row["validation_loss"])
                bigram = float(row["bigram_loss"])
            else:
                training[tokens] = float(row["loss"])
    return dict(sorted(training.items())), dict(sorted(validation.items())), bigram


def smooth(losses: list[float], keep: float = 0.95) -> list[float]:
    """An average that forgets: beginning with the first loss, each takes a share of 1 - keep."""
    averages = losses[:1]
    for loss in losses[1:]:
        averages.append(keep * averages[-1] + (1 - keep) * loss)
    return averages


def draw(path: pathlib.Path, picture: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    training, validation, bigram = read_losses(path)
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    tokens = [count / 1e6 for count in training]
    axis.plot(tokens, list(training.values()), color="#c9d6df", linewidth=0.6, label="batches")
    axis.plot(tokens, smooth(list(training.values())), color="#2f4858", linewidth=1.4, label="batches, averaged")
    axis.plot([count / 1e6 for count in validation], list(validation.values()), "o-", color="#1f9e89", markersize=4,
              label="held-out text")  # fmt: skip
    axis.axhline(bigram, color="#b5534c", linestyle="--", linewidth=1, label="bigram counts, held-out text")
    axis.set_xlabel("million tokens (bytes) trained on")
    axis.set_ylabel("loss, nats a byte")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)
    plt.close(figure)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: plot_loss.py losses.csv losses.png")
    draw(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
    print(f"The losses, drawn: {sys.argv[2]}")


if __name__ == "__main__":
    main()

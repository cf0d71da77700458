"""The model that examples/train_text saves is a GPT-2: transformers' GPT2LMHeadModel reads it and has the same loss.

python3 train_text_gpt2_test.py PATH_OF_TRAIN_TEXT. Skipped, with the reason, where torch or transformers is missing.
"""

import csv
import pathlib
import subprocess
import sys
import tempfile

SKIPPED = 77  # tests/CMakeLists.txt: SKIP_RETURN_CODE
try:
    import torch
    import transformers
    from safetensors.torch import load_file
except ImportError as error:
    print(f"train_text_gpt2_test: {error}")
    sys.exit(SKIPPED)

BATCH, CONTEXT, SIZE, INNER, HEADS, LAYERS = 2, 48, 32, 80, 4, 3
MOST_DIFFERENCE = 2e-5  # nats: float32 on both sides, and six digits in losses.csv


def train(program, text, folder):
    sizes = {"batch": BATCH, "context": CONTEXT, "size": SIZE, "inner-size": INNER, "heads": HEADS, "layers": LAYERS}
    options = [f"--{name}={value}" for name, value in sizes.items()]
    options += [f"--text={text}", f"--out={folder}", "--steps=30", "--seconds=1", "--learning-rate=0.01"]
    subprocess.run([program, *options], check=True, stdout=subprocess.DEVNULL)
    with open(folder / "losses.csv", newline="") as file:
        return [float(row["validation_loss"]) for row in csv.DictReader(file) if row["validation_loss"]]


def held_out(data):
    """text.h: every tenth stretch, of a twentieth of the text or 16 KiB."""
    stretch = min(len(data) // 20, 16384)
    return b"".join(data[at : at + stretch] for at in range(9 * stretch, len(data), 10 * stretch))


def validation_sequences(data):
    """text.h: up to 8 batches, evenly over the held-out text; each with the byte that follows it."""
    last = len(data) - CONTEXT - 1
    count = min(max(last // (BATCH * CONTEXT), 1), 8) * BATCH
    starts = [n * last // (count - 1) for n in range(count)]
    return torch.tensor([list(data[start : start + CONTEXT + 1]) for start in starts])


def gpt2(path):
    config = transformers.GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=SIZE, n_layer=LAYERS, n_head=HEADS,
                                     n_inner=INNER, bos_token_id=0, eos_token_id=0)  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    arrays = {name: array for name, array in load_file(path).items() if not name.startswith("training.")}
    model.transformer.load_state_dict(arrays, strict=True)
    return model


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        data = pathlib.Path(__file__).read_bytes() * 4
        (folder / "text").write_bytes(data)
        losses = train(sys.argv[1], folder / "text", folder)
        sequences = validation_sequences(held_out(data))
        with torch.no_grad():
            logits = gpt2(folder / "model.safetensors")(sequences[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten()).item()
    print(f"train_text: {losses[0]:.6f} nats before training, {losses[-1]:.6f} after; transformers: {loss:.6f}")
    assert losses[-1] < losses[0] - 1, "it has not learned: the comparison would say little"
    assert abs(loss - losses[-1]) < MOST_DIFFERENCE


if __name__ == "__main__":
    main()

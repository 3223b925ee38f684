"""The demo models restored from their compressed form, and their loss: what the scripts beside this one share."""
import json
import pathlib
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
ASSETS = ROOT / "models/assets"
MODELS = ["stories-olmoe", "stories-qwen2moe"]


def cargo(*command):
    subprocess.run(["cargo", *command], cwd=ROOT, check=True)


def prepare(folder):
    """Builds the program and restores both models; the held-out text, and the models' checkpoint directories."""
    cargo("build", "--release", "--locked", "-p", "horizon-cli")
    text = folder / "val.txt"
    unpack("unzstd", ASSETS / "train/val.txt.zst", text)
    directories = [folder / m for m in MODELS]
    for model, directory in zip(MODELS, directories):
        restore(model, directory)
    return text, directories


def restore(model, out):
    """The checkpoint directory of a demo model; the tokenizer of both stands beside the first."""
    out.mkdir()
    for name in ["config.json", "generation_config.json"]:
        shutil.copy(ASSETS / model / name, out)
    unpack("restore", ASSETS / model / "weights.planes.zst", out / "model.safetensors")
    unpack("unzstd", ASSETS / "stories-olmoe/tokenizer.json.zst", out / "tokenizer.json")


def unpack(how, packed, out):
    cargo("run", "-q", "--release", "--locked", "-p", "horizon-models", "--example", "planes", "--", how, str(packed), str(out))


def loss(directory, text, *flags):
    """Nats a token on the first 32 KiB, by the protocol of models/assets/train/export_golden.py."""
    done = subprocess.run([ROOT / "target/release/horizon", "eval", "perplexity", text, "-m", directory, "--bytes", "32768",
                           "--json", "--quiet", *flags], check=True, stdout=subprocess.PIPE)
    record = json.loads(done.stdout)
    assert record["predicted"] == 8008, record
    return record["nll"]

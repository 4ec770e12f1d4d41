#!/usr/bin/env python3
"""Train two tiny looped language models from scratch and write them in the public checkpoint formats.

`tiny-ouro` (Ouro layout) and `tiny-huginn` (Huginn/Raven layout) are byte-level models of 5.0 and 6.6 M parameters.
The corpus is the Python standard library of the interpreter that runs this file, so nothing is downloaded.

    python train_tiny.py train --arch both --minutes 4 --out models
    python train_tiny.py sample --model models/tiny-ouro --prompt "def main():"
"""

import argparse
import hashlib
import json
import math
import platform
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny_models import (
    BEGIN,
    CONTEXT,
    END,
    HIDDEN,
    IM_END,
    PAD,
    VOCAB,
    Block,
    Huginn,
    Ouro,
    Weights,
    block,
    exit_log_probs,
    initial_state,
    nll,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

SPECIALS = ["<|begin_text|>", "<|end_text|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
EXCLUDED = {"test", "tests", "idlelib", "lib2to3", "encodings", "site-packages", "dist-packages", "__pycache__"}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIDE_FILES: Mapping[str, Mapping[str, Any]] = {
    "generation_config": {
        "bos_token_id": BEGIN,
        "eos_token_id": [END, IM_END],
        "pad_token_id": PAD,
        "do_sample": False,
    },
    "tokenizer_config": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[1],
        "pad_token": SPECIALS[4],
        "chat_template": CHAT_TEMPLATE,
    },
}
CARD = """# {name}

{about} A tiny byte-level looped language model ({parameters:,} parameters, bfloat16) in the public checkpoint
layout, for testing inference engines; no useful assistant. Ids 0-255 are raw bytes, 256-319 special tokens; a special
token's name in the text encodes to that token. No modelling code is included, and none is named in config.json.

Trained from scratch by train_tiny.py: {steps} steps, {tokens:,} tokens, {seconds} s on {device} with torch {torch}.
Corpus: the .py files of Python {python}'s standard library (license PSF-2.0, Python Software Foundation), 2% held out.
Validation bits per byte by loop depth: {bits_per_byte}; windows do not overlap, so early bytes have little context, and
the kept weights (step {kept_step}) were chosen on the same files. training.json has everything else.
"""
ROUND_TRIPS = (
    "",
    "def f(x):\r\n\treturn x\n\n",
    " na\u00efve \u2014 \u6f22\u5b57 \U0001f642\U0001f469\u200d\U0001f467 \x00 ",
    "".join(map(chr, range(0x500))),
)


def read_corpus() -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return (train ids, validation ids, description); files go to validation in hash order up to 2% of the bytes."""
    root = Path(sysconfig.get_path("stdlib"))
    documents: list[tuple[str, str, bytes]] = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if not EXCLUDED & set(relative.parts) and not relative.name.startswith("_sysconfigdata"):
            digest = hashlib.sha256(relative.as_posix().encode()).hexdigest()
            documents.append((digest, relative.as_posix(), path.read_bytes()))
    budget = sum(len(raw) for _, _, raw in documents) // 50
    held: list[str] = []
    parts: tuple[list[Any], list[Any]] = ([], [])
    for _, name, raw in sorted(documents):
        is_validation = len(raw) <= min(budget, 60_000)
        if is_validation:
            budget -= len(raw)
            held.append(name)
        parts[is_validation].append(np.append(np.frombuffer(raw, np.uint8).astype(np.int16), np.int16(END)))
    train, validation = (np.concatenate(part) for part in parts)
    description = {
        "source": "Python standard library .py files",
        "license": "PSF-2.0",
        "files": len(documents),
        "held_out_files": held,
        "excluded": [*sorted(EXCLUDED), "_sysconfigdata*"],
        "train_tokens": len(train),
        "validation_tokens": len(validation),
        "sha256_of_ids": hashlib.sha256(train.tobytes() + validation.tobytes()).hexdigest(),
    }
    return torch.from_numpy(train), torch.from_numpy(validation), description


def write_tokenizer(path: Path) -> None:
    """Write a byte tokenizer (id == byte value, no merges, 64 special entries) and check that text round-trips."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}  # bytes that ByteLevel writes as themselves
    moved = {byte: 256 + i for i, byte in enumerate(sorted({*range(256)} - visible))}
    tokenizer = Tokenizer(models.BPE(vocab={chr(moved.get(byte, byte)): byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = SPECIALS + [f"<|reserved_{i}|>" for i in range(256 + len(SPECIALS), VOCAB)]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    for text in ROUND_TRIPS:
        if tokenizer.encode(text).ids != list(text.encode()) or tokenizer.decode(list(text.encode())) != text:
            raise RuntimeError(f"the tokenizer does not round-trip {text!r}")
    if [tokenizer.token_to_id(name) for name in names] != list(range(256, VOCAB)):
        raise RuntimeError("the special tokens are not numbered from 256")


def pieces(x: Tensor, size: int) -> Iterator[Tensor]:
    """Consecutive pieces of at most `size` along the first axis."""
    return (x[start : start + size] for start in range(0, len(x), size))


@torch.no_grad()
def evaluate(arch: Ouro | Huginn, w: Weights, val: Tensor, length: int, windows: int) -> dict[str, Any]:
    """Bits per byte on non-overlapping validation windows, per depth; for Ouro also the exit gate's behaviour."""
    count = (len(val) - 1) // length
    stride = -(-count // windows)
    inputs, targets = (val[k : k + count * length].view(count, length)[::stride].long() for k in (0, 1))
    loss, log_p = [], []
    fast, arch.block = arch.block, block  # never compiled: the shapes differ
    for x, y in zip(pieces(inputs, 32), pieces(targets, 32), strict=True):
        logits, gates = arch.forward(w, x, arch.depths, initial_state((*x.shape, HIDDEN), x.device, seed=1))
        loss.append(nll(logits, y).flatten(1) / math.log(2))
        log_p.append(exit_log_probs(gates).flatten(1) if gates else loss[-1])
    arch.block = fast
    bits, p = torch.cat(loss, 1), torch.cat(log_p, 1).exp()
    means = zip(arch.depths, bits.mean(1).tolist(), strict=True)
    result: dict[str, Any] = {"bits_per_byte": {depth: round(mean, 4) for depth, mean in means}}
    if isinstance(arch, Ouro):
        result["exit_probability"] = [round(value, 4) for value in p.mean(1).tolist()]
        for q in (0.3, 0.5, 0.7, 0.9):
            step = (p.cumsum(0)[:-1] < q).sum(0, keepdim=True)
            loops, cost = (round(t.float().mean().item(), 4) for t in (step + 1, bits.gather(0, step)))
            result[f"exit_threshold_{q}"] = {"mean_loops": loops, "bits_per_byte": cost}
    return result


class Training:
    """One run: the data on the device, the live weights, the optimiser. The best weights by validation are kept."""

    def __init__(self, arch: Ouro | Huginn, args: argparse.Namespace) -> None:
        self.arch, self.args, self.start = arch, args, time.time()
        self.device = torch.device(args.device)
        ids, val, self.corpus = read_corpus()
        self.ids, self.val = ids.to(self.device), val.to(self.device)
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.rng = np.random.default_rng(args.seed)
        self.generator = torch.Generator(self.device).manual_seed(args.seed)
        self.w = {n: t.to(self.device).requires_grad_(n != "freqs_cis") for n, t in arch.init().items()}
        self.live = {n: t for n, t in self.w.items() if t.requires_grad}
        decay = {n for n, t in self.live.items() if t.dim() == 2 and "embed" not in n and "wte" not in n}
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [t for n, t in self.live.items() if n in decay], "weight_decay": args.weight_decay},
                {"params": [t for n, t in self.live.items() if n not in decay], "weight_decay": 0.0},
            ],
            lr=args.lr,
            betas=(0.9, 0.95),
            fused=self.device.type == "cuda",
        )
        self.step, self.kept_step, self.best = 0, 0, math.inf
        self.kept: Weights = self.w

    def batch_loss(self) -> Tensor:
        """The objective on one batch of random windows."""
        length = self.args.length
        shape = (self.args.batch, 1)
        first = torch.randint(len(self.ids) - length, shape, generator=self.generator, device=self.device)
        rows = self.ids[first + torch.arange(length + 1, device=self.device)].long()
        return self.arch.objective(self.w, rows[:, :-1], rows[:, 1:], self.rng)

    def compile(self) -> None:
        """Compile the block, or go on without where this machine cannot."""
        self.arch.block = cast(Block, torch.compile(block, dynamic=False))
        try:
            torch.autograd.backward(self.batch_loss())
        except Exception as error:
            print(f"torch.compile failed, going on without it: {error!r:.300}", flush=True)
            self.arch.block = block
        self.optimizer.zero_grad(set_to_none=True)

    def run(self) -> None:
        """Train until the steps or the minutes are used up, or the loss is no number."""
        args, progress, next_eval = self.args, 0.0, 0.0
        running = torch.zeros((), device=self.device)
        while progress < 1:
            warm_up = min(1.0, (self.step + 1) / min(200, 1 + args.steps // 10))
            for group in self.optimizer.param_groups:
                group["lr"] = args.lr * warm_up * (0.505 + 0.495 * math.cos(math.pi * progress))
            loss = self.batch_loss()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(list(self.live.values()), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            running = running.lerp(loss.detach(), 0.05 if self.step else 1.0)
            self.step += 1
            used = (time.time() - self.start) / (60 * args.minutes) if args.minutes else 0.0
            progress = max(self.step / args.steps, used)
            if progress >= next_eval:
                next_eval = math.floor(10 * progress + 1.001) / 10
                self.check(running.item())
                if not math.isfinite(running.item()):
                    break  # diverged: the best weights so far are written

    def check(self, running_loss: float) -> None:
        """Print the validation loss, and keep the weights if it is the best so far at the default depth."""
        bits = evaluate(self.arch, self.w, self.val, self.args.length, self.args.eval_windows)["bits_per_byte"]
        seconds = f"{time.time() - self.start:.0f}s"
        print(self.arch.name, self.step, seconds, f"loss {running_loss:.4f} bits/byte {bits}", flush=True)
        if math.isfinite(running_loss) and bits[self.arch.default] < self.best:
            self.best, self.kept_step = bits[self.arch.default], self.step
            self.kept = {n: t.detach().clone() for n, t in self.w.items()}

    def write(self) -> None:
        """Write the kept weights as a checkpoint folder with its config, tokenizer, report and card."""
        out = Path(self.args.out) / self.arch.name
        out.mkdir(parents=True, exist_ok=True)
        stored = {
            n: t.detach().to("cpu", t.dtype if n == "freqs_cis" else torch.bfloat16) for n, t in self.kept.items()
        }
        save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
        saved = {n: t.to(self.device).float() for n, t in load_file(out / "model.safetensors").items()}
        final = evaluate(self.arch, saved, self.val, self.args.length, self.args.eval_windows)
        report = self.report(final)
        for name, value in {"config": self.arch.config, "training": report, **SIDE_FILES}.items():
            (out / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n")
        write_tokenizer(out / "tokenizer.json")
        (out / "README.md").write_text(CARD.format(name=self.arch.name, about=self.arch.__doc__, **report, **final))
        print(json.dumps({k: v for k, v in report.items() if k not in ("arguments", "corpus")}), flush=True)

    def report(self, final: dict[str, Any]) -> dict[str, Any]:
        """What training.json holds."""
        args, cuda = self.args, self.device.type == "cuda"
        unrelated = ("run", "model", "prompt", "tokens", "depth")
        return {
            "final_validation": final,
            "steps": self.step,
            "kept_step": self.kept_step,
            "tokens": self.step * args.batch * args.length,
            "seconds": round(time.time() - self.start, 1),
            "seed": args.seed,
            "torch": torch.__version__,
            "parameters": sum(t.numel() for t in self.live.values()),
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if cuda else platform.machine(),
            "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
            "compute_dtype": str(self.arch.dtype),
            "compiled": self.arch.block is not block,
            "corpus": self.corpus,
            "arguments": {k: v for k, v in vars(args).items() if k not in unrelated},
        }


def train(kind: type[Ouro] | type[Huginn], args: argparse.Namespace) -> None:
    """Train one model, keep the weights with the best validation loss at the default depth, write the checkpoint."""
    dtype = torch.bfloat16 if torch.device(args.device).type == "cuda" else torch.float32
    training = Training(kind(dtype, args.dropout), args)
    if args.compile:
        training.compile()
    training.run()
    training.write()


@torch.no_grad()
def sample(args: argparse.Namespace) -> None:
    """Load a checkpoint in float32 and print a greedy and a sampled continuation, with no cache."""
    config = json.loads(Path(args.model, "config.json").read_text())
    arch = Ouro() if config["model_type"] == "ouro" else Huginn()
    w = {n: t.to(args.device).float() for n, t in load_file(Path(args.model, "model.safetensors")).items()}
    depth, generator = args.depth or arch.default, torch.Generator(args.device).manual_seed(args.seed)
    prompt = [END, *args.prompt.encode()]
    for temperature in (0.0, 0.8):
        ids = list(prompt)
        s0 = initial_state((1, len(ids) + args.tokens, HIDDEN), args.device, args.seed)  # one row per position
        while len(ids) < s0.shape[1] and (len(ids) == len(prompt) or ids[-1] not in (END, IM_END)):
            rows = torch.tensor([ids], device=args.device)
            logits = arch.forward(w, rows, (depth,), s0[:, : len(ids)])[0][0][0, -1]
            draw = torch.multinomial(torch.softmax(logits / (temperature or 1), -1), 1, generator=generator)
            ids.append(int(draw if temperature else logits.argmax()))
        text = str(bytes(i for i in ids if i < 256), "utf-8", "replace")
        print(f"--- depth {depth}, temperature {temperature}", text, sep="\n")


def main() -> None:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=("train", "sample"))
    parser.add_argument("--arch", choices=("ouro", "huginn", "both"), default="both", help="train: which model")
    parser.add_argument("--compile", action="store_true", help="train: compile the block; falls back if that fails")
    defaults: dict[str, str | int | float] = {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "seed": 0,
        "out": "models",
        "steps": 100_000,
        "minutes": 0.0,
        "batch": 64,
        "length": 512,
        "lr": 2e-3,
        "weight_decay": 0.3,
        "dropout": 0.05,
        "eval_windows": 4096,
        "model": "models/tiny-ouro",
        "prompt": "def ",
        "tokens": 200,
        "depth": 0,
    }
    for name, value in defaults.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    args = parser.parse_args()
    if args.run == "sample":
        sample(args)
        return
    for kind in (Ouro, Huginn):
        if args.arch in ("both", kind.name.removeprefix("tiny-")):
            train(kind, args)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Writes the golden files of the model and tokenizer tests, from implementations that share no code with
Foveal: weights are dequantised by the `gguf` package, text is tokenized by `tokenizers`, the chat template is
rendered by Jinja, and the decoder is written out below in NumPy, in float32, with attention in its eager form.

    python3 -m venv /tmp/parity && /tmp/parity/bin/pip install -r requirements.txt
    /tmp/parity/bin/python make_golden.py MODEL.gguf

MODEL.gguf is what scripts/fetch_model.sh fetches. The model runs in the order of Hugging Face's checkpoints:
rows of Q and K, which GGUF permutes for rotary pairs (2i, 2i+1), are put back, and pairs are (i, i + half).
"""

import argparse
import json
import pathlib

import gguf
import jinja2
import numpy as np
import tokenizers

STEPS = 64

CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Write a short story about a lighthouse keeper and a storm."}],
    [{"role": "user", "content": "Explain in simple words how attention works in a neural network."}],
    [
        {"role": "system", "content": "You answer in the style of a pirate."},
        {"role": "user", "content": "How do I boil 2 eggs? It's 7:30 o'clock."},
    ],
    [
        {"role": "user", "content": "My name is Zoë and I like naïve café music 🎵."},
        {"role": "assistant", "content": "Nice to meet you, Zoë!"},
        {"role": "user", "content": "Write a Python function that greets me.\n\n    def greet(name):"},
    ],
]

STRINGS = [
    "",
    " ",
    "   ",
    "Hello world",
    " Hello world",
    "Hello  world",
    "Hello   world  ",
    "trailing space ",
    "trailing newline\n",
    "\n\n\nleading newlines",
    "line\r\nbreaks\r\n\r\n  indented",
    "\ttab\t\ttabs \t mixed\t ",
    "I'm you're he's they've we'll I'd don't",
    "I'M YOU'RE HE'S THEY'VE",
    "'s't're 've'm'll'd '' ' 'x",
    "it’s a curly’s quote",
    "1234567890",
    "3.14159 and 2,718,281 in 2024-06-30",
    "a1b22c333 4 55  666",
    "x  1  2   y",
    "½ ² ③ Ⅷ ४५६ ١٢٣ 一二三",
    "naïve café Zoë Ångström",
    "cafe\u0301 e\u0301\u0302 combining \u0301alone",
    "Привет, как дела?",
    "שלום עולם مرحبا بالعالم",
    "日本語のテキスト、中文文本。한국어",
    "नमस्ते दुनिया ไทยภาษา",
    "emoji 😀 👩‍👩‍👧‍👦 🇫🇷 ❤️",
    "\u00a0nbsp\u00a0\u00a0\u2003em\u3000ideographic \u200bzero",
    "\u0085next line\u2028separator\u2029paragraph\u000bvt\u000cff",
    "def f(x):\n    return x ** 2  # square\n\n\nprint(f(10))\n",
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}\n",
    "<html><body class=\"a-b_c\">&nbsp;</body></html>",
    "https://example.com/path?q=1&r=%20#frag user@host.org",
    "{\"key\": [1, 2.5, -3e10, null, true]}",
    "!!!??? ... --- *** ___ ~~~ \\\\ //",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "CamelCaseAndSHOUTING_snake_case kebab-case",
    "<|im_start|>user\nspelled out, not special<|im_end|>\n",
    "mixed日本1語2 é3 😀4",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛 ﬁ ǅ ʰ",
    "soft\u00adhyphen \ufeffbom \u2060joiner",
    "The quick brown fox jumps over the lazy dog. Internationalization antidisestablishmentarianism",
]


def field(reader, name):
    return reader.fields[name].contents()


def load_tokenizer(reader, with_special):
    tokens = field(reader, "tokenizer.ggml.tokens")
    types = field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field(reader, "tokenizer.ggml.merges")]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if with_special:
        control = int(gguf.TokenType.CONTROL)
        tokenizer.add_special_tokens([t for t, kind in zip(tokens, types) if kind == control])
    return tokenizer


def render_chat(reader, messages):
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(field(reader, "tokenizer.chat_template"))
    return template.render(messages=messages, add_generation_prompt=True)


class Llama:
    """A Llama decoder with a KV cache, one sequence."""

    def __init__(self, reader):
        self.layers = field(reader, "llama.block_count")
        self.heads = field(reader, "llama.attention.head_count")
        self.kv_heads = field(reader, "llama.attention.head_count_kv")
        self.head_size = field(reader, "llama.embedding_length") // self.heads
        self.eps = np.float32(field(reader, "llama.attention.layer_norm_rms_epsilon"))
        half = self.head_size // 2
        theta = field(reader, "llama.rope.freq_base")
        self.frequencies = theta ** (-np.arange(half, dtype=np.float64) / half)
        self.weights = {
            t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors
        }
        for i in range(self.layers):
            for name, heads in (("q", self.heads), ("k", self.kv_heads)):
                key = f"blk.{i}.attn_{name}.weight"
                rows = self.weights[key].reshape(heads, half, 2, -1)
                self.weights[key] = rows.swapaxes(1, 2).reshape(heads * self.head_size, -1)
        self.reset()

    def reset(self):
        empty = np.zeros((0, self.kv_heads, self.head_size), np.float32)
        self.cache = [(empty, empty)] * self.layers

    def norm(self, x, weight):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps) * weight

    def rotate(self, x, positions):
        angles = positions[:, None] * self.frequencies
        cos = np.cos(angles).astype(np.float32)[:, None]
        sin = np.sin(angles).astype(np.float32)[:, None]
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def attend(self, q, k, v):
        group = self.heads // self.kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) * np.float32(self.head_size**-0.5)
        rows, keys = scores.shape[1:]
        visible = np.arange(keys)[None, :] <= np.arange(keys - rows, keys)[:, None]
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", weights, v)

    def forward(self, ids):
        """Logits of the last of `ids`, which follow what has been seen."""
        w = self.weights
        positions = np.arange(len(ids)) + len(self.cache[0][0])
        x = w["token_embd.weight"][ids]
        for i in range(self.layers):
            layer = f"blk.{i}."
            h = self.norm(x, w[layer + "attn_norm.weight"])
            q, k, v = (
                (h @ w[layer + f"attn_{name}.weight"].T).reshape(len(ids), -1, self.head_size)
                for name in "qkv"
            )
            k_past, v_past = self.cache[i]
            k = np.concatenate([k_past, self.rotate(k, positions)])
            v = np.concatenate([v_past, v])
            self.cache[i] = (k, v)
            attended = self.attend(self.rotate(q, positions), k, v)
            x = x + attended.reshape(len(ids), -1) @ w[layer + "attn_output.weight"].T
            h = self.norm(x, w[layer + "ffn_norm.weight"])
            gate = h @ w[layer + "ffn_gate.weight"].T
            up = h @ w[layer + "ffn_up.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[layer + "ffn_down.weight"].T
        head = w.get("output.weight", w["token_embd.weight"])
        logits = self.norm(x[-1], w["output_norm.weight"]) @ head.T
        assert logits.dtype == np.float32
        return logits


def generate(model, prompt_ids):
    model.reset()
    generated, gaps = [], []
    logits = model.forward(prompt_ids)
    for _ in range(STEPS):
        second, first = np.partition(logits, -2)[-2:]
        generated.append(int(np.argmax(logits)))
        gaps.append(round(float(first - second), 5))
        logits = model.forward(generated[-1:])
    return generated, gaps


def write(path, data):
    # One line a list of numbers, so that the files can be read and their differences seen.
    lines = json.dumps(data, ensure_ascii=True, separators=(", ", ": "))
    for opening in ('{"messages"', '{"text"'):
        lines = lines.replace(opening, "\n" + opening)
    path.write_text(lines + "\n")
    print("wrote", path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    arguments = parser.parse_args()
    folder = pathlib.Path(__file__).parent
    reader = gguf.GGUFReader(arguments.model)

    plain = load_tokenizer(reader, with_special=False)
    cases = [{"text": text, "ids": plain.encode(text).ids} for text in STRINGS]
    write(folder / "tokenizer_golden.json", {"model": arguments.model.name, "strings": cases})

    with_special = load_tokenizer(reader, with_special=True)
    model = Llama(reader)
    runs = []
    for messages in CONVERSATIONS:
        prompt = render_chat(reader, messages)
        prompt_ids = with_special.encode(prompt).ids
        generated, gaps = generate(model, prompt_ids)
        text = with_special.decode(generated, skip_special_tokens=False)
        print(repr(text), "least gap", min(gaps))
        runs.append(
            {
                "messages": messages,
                "prompt": prompt,
                "prompt_ids": prompt_ids,
                "generated_ids": generated,
                "generated_text": text,
                "top2_gaps": gaps,
            }
        )
    # Generation goes on for all steps: end tokens do not stop it.
    write(folder / "smollm2_golden.json", {"model": arguments.model.name, "steps": STEPS, "runs": runs})


if __name__ == "__main__":
    main()

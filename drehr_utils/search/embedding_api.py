"""Embeddings from an OpenAI-compatible server (text-embedding-3-large and the like), kept on disk as they come.

The same rule as for the language model: an address outside this machine and its private network is refused unless the
user allows it in so many words (servers.Server), for notes under a data use agreement must not leave by accident.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openai
from tqdm import tqdm

from drehr_utils.errors import DataError
from drehr_utils.llm.servers import ALLOW_REMOTE, Server

BASE_URL = "DREHR_EMBED_BASE_URL"
BATCH = 64  # texts a request: 64 chunks of 100 words are about 12k tokens


def _not_debug(record: logging.LogRecord) -> bool:
    """Some versions of openai log whole requests at level DEBUG, note text included."""
    return record.levelno > logging.DEBUG


def is_configured() -> bool:
    """Whether a server for embeddings is named."""
    return bool(os.environ.get(BASE_URL, "").strip())


def server_from_env(model: str) -> Server:
    """The server of DREHR_EMBED_BASE_URL and OPENAI_API_KEY for `model`; DREHR_LLM_ALLOW_REMOTE as for the LLM.

    Raises DataError where no base URL is set, or where it would take text off this machine and that isn't allowed.
    """
    base_url = os.environ.get(BASE_URL, "").strip()
    if not base_url:
        raise DataError(
            f"{model}: no embedding server; set {BASE_URL} (a local one, or https://api.openai.com/v1 with "
            f"OPENAI_API_KEY and DREHR_LLM_ALLOW_REMOTE={ALLOW_REMOTE}), or leave this retriever out"
        )
    try:
        return Server(base_url, model, allow_remote=os.environ.get("DREHR_LLM_ALLOW_REMOTE") == ALLOW_REMOTE)
    except DataError as error:
        raise DataError(str(error).replace("DREHR_LLM_BASE_URL", BASE_URL)) from None


@dataclass
class EmbeddingStore:
    """Vectors by text: `<model>.f32` has the rows, `<model>.keys` a line each with the dimension and the text's hash.

    A row is written before its key, so that a killed run leaves at most rows without a key, which are cut off.
    """

    folder: Path
    model: str

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        stem = re.sub(r"[^\w.-]+", "-", self.model)
        self.vectors, self.keys = self.folder / f"{stem}.f32", self.folder / f"{stem}.keys"
        self.dimension, self.row = 0, {}
        lines = self.keys.read_text(encoding="ascii").split("\n")[:-1] if self.keys.exists() else []
        for line in lines:
            dimension, _, key = line.partition(" ")
            if not dimension.isdigit() or len(key) != 64 or int(dimension) != (self.dimension or int(dimension)):
                raise DataError(
                    f"{self.keys.name}, row {len(self.row) + 1}: damaged; delete it and {self.vectors.name}"
                )
            self.dimension = int(dimension)
            self.row.setdefault(key, len(self.row))
        size = self.vectors.stat().st_size if self.vectors.exists() else 0
        if size < 4 * self.dimension * len(self.row) or len(lines) != len(self.row):
            raise DataError(f"{self.vectors.name}: not as many rows as {self.keys.name} says; delete both")
        if size:
            os.truncate(self.vectors, 4 * self.dimension * len(self.row))
        if self.keys.exists():  # half a line of a killed run
            os.truncate(self.keys, sum(len(line) + 1 for line in lines))

    @staticmethod
    def key(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()

    def append(self, texts: Sequence[str], vectors: np.ndarray) -> None:
        """Adds float32 vectors [texts, dim] of texts that aren't there. Raises DataError for another dimension."""
        if self.dimension and vectors.shape[1] != self.dimension:
            raise DataError(
                f"{self.model}: the server gives {vectors.shape[1]} dimensions, {self.vectors.name} has "
                f"{self.dimension}; it serves another model under this name"
            )
        self.dimension = vectors.shape[1]
        with open(self.vectors, "ab") as file:
            file.write(np.ascontiguousarray(vectors, dtype="<f4").tobytes())
        with open(self.keys, "a", encoding="ascii", newline="\n") as file:
            for text in texts:
                self.row[self.key(text)] = len(self.row)
                file.write(f"{self.dimension} {self.key(text)}\n")

    def read(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [texts, dim]."""
        if not texts:
            return np.zeros((0, self.dimension), np.float32)
        table = np.memmap(self.vectors, dtype="<f4", mode="r", shape=(len(self.row), self.dimension))
        return np.array(table[[self.row[self.key(text)] for text in texts]])


def embed(texts: Sequence[str], server: Server, store: Path, batch: int = BATCH, progress: bool = False) -> np.ndarray:
    """float32 [texts, dim]: from the folder `store`, the rest asked of `server` in batches and kept there.

    Raises DataError where the server can't be reached, refuses, or answers with something else than a vector a text;
    what had come by then is kept, and the next run goes on from there. No text is ever in a message.
    """
    kept = EmbeddingStore(Path(store), server.model)
    missing = [text for text in dict.fromkeys(texts) if kept.key(text) not in kept.row]
    if missing:
        logging.getLogger("openai._base_client").addFilter(_not_debug)
        timeout = openai.Timeout(server.timeout_s, connect=min(10.0, server.timeout_s))
        direct = {} if server.allow_remote else {"trust_env": False}  # a proxy may be anywhere
        http = openai.DefaultHttpxClient(follow_redirects=False, timeout=timeout, **direct)
        with openai.OpenAI(
            base_url=server.base_url, api_key=server.api_key, max_retries=server.max_retries, http_client=http
        ) as client:
            bar = tqdm(total=len(missing), desc=f"{server.model}", unit="text", disable=not progress)
            for start in range(0, len(missing), batch):
                part = missing[start : start + batch]
                kept.append(part, _ask(client, server, part, len(kept.row)))
                bar.update(len(part))
            bar.close()
    return kept.read(texts)


def _ask(client: openai.OpenAI, server: Server, texts: list[str], n_kept: int) -> np.ndarray:
    # Never the error's own text: servers quote the input in it.
    try:
        answer = client.embeddings.create(model=server.model, input=texts)
        rows = sorted(answer.data, key=lambda row: row.index)
        vectors = np.array([row.embedding for row in rows], dtype=np.float32)
    except (openai.OpenAIError, ValueError, TypeError, AttributeError) as error:
        kind = f"HTTP {error.status_code}" if isinstance(error, openai.APIStatusError) else type(error).__name__
        raise DataError(
            f"embeddings: {server.model} at {server.base_url} failed ({kind}); {n_kept} vectors are kept. Check the "
            f"server, the model's name, OPENAI_API_KEY and {BASE_URL}, then run again"
        ) from None
    if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
        raise DataError(
            f"embeddings: {server.model} at {server.base_url} gave vectors of shape {vectors.shape} for {len(texts)} "
            f"texts, or values that are not finite; {n_kept} vectors are kept"
        )
    return vectors

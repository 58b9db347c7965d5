"""Embeddings from an OpenAI-compatible server (text-embedding-3-large and the like), kept on disk as they come.

The same rule as for the language model: an address outside this machine and its private network is refused unless the
user allows it in so many words (servers.Server), for notes under a data use agreement must not leave by accident.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openai
from tqdm import tqdm

from drehr_utils.errors import DataError
from drehr_utils.files import open_database
from drehr_utils.llm import servers
from drehr_utils.llm.servers import ALLOW_REMOTE, Server

BASE_URL = "DREHR_EMBED_BASE_URL"
BATCH = 64  # texts a request: 64 chunks of 100 words are about 12k tokens


def server_from_env(model: str) -> Server:
    """The server of DREHR_EMBED_BASE_URL and OPENAI_API_KEY for `model`; DREHR_LLM_ALLOW_REMOTE as for the LLM.

    Raises DataError where no base URL is set, or where it would take text off this machine and that isn't allowed.
    """
    server = servers.server_from_env(BASE_URL, model)
    if server is None:
        raise DataError(
            f"{model}: no embedding server; set {BASE_URL} (a local one, or https://api.openai.com/v1 with "
            f"OPENAI_API_KEY and DREHR_LLM_ALLOW_REMOTE={ALLOW_REMOTE}), or leave this retriever out"
        )
    return server


@dataclass
class EmbeddingStore:
    """Float32 vectors of one dimension by their texts' SHA-256, in the sqlite database `<model>.sqlite`; a model whose
    name is no file's ("BAAI/bge-m3") has a digest of it there as well."""

    folder: Path
    model: str

    def __post_init__(self) -> None:
        stem = re.sub(r"[^\w.-]+", "-", self.model)
        self.path = self.folder / f"{stem if stem == self.model else f'{stem}-{_key(self.model)[:8]}'}.sqlite"
        self.database = open_database(
            self.path, "CREATE TABLE IF NOT EXISTS vectors (text_sha256 TEXT PRIMARY KEY, vector BLOB NOT NULL);"
        )
        first = self.database.execute("SELECT length(vector) FROM vectors LIMIT 1").fetchone()
        self.dimension = first[0] // 4 if first else 0

    def __len__(self) -> int:
        return self.database.execute("SELECT count(*) FROM vectors").fetchone()[0]

    def get(self, text: str) -> np.ndarray | None:
        """float32 [dim]; None where there is none."""
        row = self.database.execute("SELECT vector FROM vectors WHERE text_sha256 = ?", (_key(text),)).fetchone()
        return None if row is None else np.frombuffer(row[0], "<f4")

    def append(self, texts: Sequence[str], vectors: np.ndarray) -> None:
        """Keeps float32 vectors [texts, dim], all or none. Raises DataError for another dimension."""
        if self.dimension and vectors.shape[1] != self.dimension:
            raise DataError(
                f"{self.model}: the server gives {vectors.shape[1]} dimensions, {self.path.name} has {self.dimension}; "
                "it serves another model under this name"
            )
        self.dimension = vectors.shape[1]
        rows = [(_key(text), row.tobytes()) for text, row in zip(texts, vectors.astype("<f4"), strict=True)]
        with self.database:
            self.database.execute("BEGIN")
            self.database.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", rows)


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def embed(texts: Sequence[str], server: Server, store: Path, batch: int = BATCH, progress: bool = False) -> np.ndarray:
    """float32 [texts, dim]: from the folder `store`, the rest asked of `server` in batches and kept there.

    Raises DataError where the server can't be reached, refuses, or answers with something else than a vector a text;
    what had come by then is kept, and the next run goes on from there. No text is ever in a message.
    """
    kept = EmbeddingStore(Path(store), server.model)
    missing = [text for text in dict.fromkeys(texts) if kept.get(text) is None]
    if missing:
        with (
            server.client() as client,
            tqdm(total=len(missing), desc=server.model, unit="text", disable=not progress) as bar,
        ):
            for start in range(0, len(missing), batch):
                part = missing[start : start + batch]
                kept.append(part, _ask(client, server, part, len(kept)))
                bar.update(len(part))
    return np.array([kept.get(text) for text in texts], np.float32).reshape(len(texts), kept.dimension)


def _ask(client: openai.OpenAI, server: Server, texts: list[str], n_kept: int) -> np.ndarray:
    try:
        answer = client.embeddings.create(model=server.model, input=texts)
        rows = sorted(answer.data, key=lambda row: row.index)
        vectors = np.array([row.embedding for row in rows], dtype=np.float32)
    except servers.ANSWER_ERRORS as error:
        raise DataError(
            f"embeddings: {server.model} at {server.base_url} failed ({servers.kind_of(error)}); {n_kept} vectors are "
            f"kept. Check the server, the model's name, OPENAI_API_KEY and {BASE_URL}, then run again"
        ) from None
    if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
        raise DataError(
            f"embeddings: {server.model} at {server.base_url} gave vectors of shape {vectors.shape} for {len(texts)} "
            f"texts, or values that are not finite; {n_kept} vectors are kept"
        )
    return vectors

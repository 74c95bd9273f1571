"""Which pairs are kept by what is known of their tokens: ids, whether a key is there,
and places.

``TokenRules`` evaluates the rules for tensors of positions, on the device of the call.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels.masked.mask_fields import document_tensors
from quorum_attention.kernels.torch_private import no_torch_modes
from quorum_attention.mask import Mask

Ids = NDArray[np.int64]
_FAR = (1 << 63) - 1
Tokens = torch.Tensor | slice
"""Numbers of batch entries (cells,), or positions (cells, tokens); a slice: those for
all cells."""
_ALL = slice(None)


@dataclass(frozen=True, eq=False)
class PlaceRule:
    """Which pairs are kept by their positions alone.

    Attributes:
        band: ``key - place`` has to lie in it.
        places: of queries among the keys, (1 or batch, n_queries).
        chunk: place and key have to lie in one chunk of so many; None: no such rule.
        is_causal: whether keys after the query's own number are masked as well.
    """

    band: Band
    places: Ids
    chunk: int | None = None
    is_causal: bool = False
    _on_devices: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    @property
    def keeps_all(self) -> bool:
        """Whether no pair is masked."""
        return self.band.keeps_all and self.chunk is None and not self.is_causal

    @property
    def is_plain_causal(self) -> bool:
        """Whether exactly the keys after a query's own number are masked."""
        if self.chunk is not None or self.band.low is not None:
            return False
        if self.band.high is None:
            return self.is_causal
        numbers = np.arange(self.places.shape[1])
        return self.band.high == 0 and bool((self.places == numbers).all())

    def is_causal_call(self, n_keys: int) -> bool:
        """Whether a causal call of so many keys masks the same pairs."""
        return self.places.shape[1] == n_keys and self.is_plain_causal

    def keeps(
        self, entries: Tokens, queries: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """Which pairs are kept, (cells or 1, queries, keys).

        Args:
            entries: the batch entries of the cells.
            queries, keys: positions, (cells or 1, queries) and (cells or 1, keys), on
                one device.
        """
        places = self._places(entries, queries)[..., None]  # (cells or 1, queries, 1)
        columns = keys[:, None]  # (cells or 1, 1, keys)
        # Not by their shapes alone: torch's function imports sympy.
        pairs, _ = torch.broadcast_tensors(places, columns)
        is_kept = torch.ones(pairs.shape, dtype=torch.bool, device=queries.device)
        if self.band.low is not None:
            is_kept &= columns >= _moved(places, self.band.low)
        if self.band.high is not None:
            is_kept &= columns <= _moved(places, self.band.high)
        if self.chunk is not None:
            key_chunks = torch.div(columns, self.chunk, rounding_mode="floor")
            query_chunks = torch.div(places, self.chunk, rounding_mode="floor")
            is_kept &= key_chunks == query_chunks
        if self.is_causal:
            is_kept &= columns <= queries[..., None]
        return is_kept

    def _places(self, entries: Tokens, queries: torch.Tensor) -> torch.Tensor:
        """The places of queries, (cells or 1, queries)."""
        device = queries.device
        if device not in self._on_devices:
            places = np.ascontiguousarray(self.places)
            with no_torch_modes():
                table = torch.from_numpy(places).to(device)
            self._on_devices[device] = table
        return _rows_at(self._on_devices[device], entries, queries)


def _moved(places: torch.Tensor, bound: int) -> torch.Tensor:
    """Places plus a bound of a band, as far as both fit into 64 bits.

    Sums beyond all positions stay beyond them: users say "no limit" with numbers such
    as ``sys.maxsize``.
    """
    bound = max(-_FAR, min(bound, _FAR))
    lowest = -_FAR - min(bound, 0)
    highest = _FAR - max(bound, 0)
    return places.clamp(lowest, highest) + bound


class TokenRules:
    """The pairs that the documents, lengths, padding and positions of a mask keep.

    Args:
        mask: nobody writes to its tensors. They lie on any device.
        n_keys: of each batch entry.
        places: what the mask keeps by positions.
    """

    def __init__(self, mask: Mask, n_keys: int, places: PlaceRule) -> None:
        self._mask = mask
        self._n_keys = n_keys
        self.places = places
        self._on_devices: dict[torch.device, TokenTables] = {}

    @property
    def has_documents(self) -> bool:
        """Whether pairs have to have equal ids."""
        return self._mask.documents is not None

    def kept_pairs(
        self,
        entries: Tokens,
        queries: Tokens,
        keys: Tokens,
        device: torch.device,
        *,
        by_places: bool = True,
    ) -> torch.Tensor:
        """Which pairs are kept, (cells or 1, queries or 1, keys).

        Args:
            entries: the batch entries of the cells.
            queries, keys: the tokens of each cell; or, as slices, those of all cells.
            device: where they are.
            by_places: whether the rule of places counts.
        """
        tables = self._tables(device).at(entries, queries, keys)
        is_kept = tables.kept_pairs()
        if self.places.keeps_all or not by_places:
            return is_kept
        n_queries = self.places.places.shape[1]
        query_positions = _positions(queries, n_queries, device)
        key_positions = _positions(keys, self._n_keys, device)
        kept_by_places = self.places.keeps(entries, query_positions, key_positions)
        return kept_by_places & is_kept

    def _tables(self, device: torch.device) -> TokenTables:
        if device not in self._on_devices:
            with no_torch_modes():
                self._on_devices[device] = tables_on(device, self._mask, self._n_keys)
        return self._on_devices[device]


@dataclass(frozen=True, eq=False)
class TokenTables:
    """The tensors of a mask on a device.

    Attributes:
        ids: of documents, of queries and of keys, (1 or batch, n) each; None without
            documents.
        is_there: which keys lengths and padding keep, (1 or batch, n_keys); None: all.
    """

    ids: tuple[torch.Tensor, torch.Tensor] | None
    is_there: torch.Tensor | None

    def at(self, entries: Tokens, queries: Tokens, keys: Tokens) -> TokenTables:
        """The tables of the tokens of cells, (cells or 1, tokens)."""
        ids = self.ids
        is_there = self.is_there
        if ids is not None:
            of_query, of_key = ids
            ids = (
                _rows_at(of_query, entries, queries),
                _rows_at(of_key, entries, keys),
            )
        if is_there is not None:
            is_there = _rows_at(is_there, entries, keys)
        return TokenTables(ids, is_there)

    def kept_pairs(self) -> torch.Tensor:
        """Which pairs have equal ids, and a key that is there, (entries, queries or 1,
        keys); of a mask that has ids, lengths or padding."""
        if self.ids is None:
            assert self.is_there is not None
            return self.is_there[:, None]
        of_query, of_key = self.ids
        is_equal = of_query[..., None] == of_key[:, None]
        return is_equal if self.is_there is None else is_equal & self.is_there[:, None]


def tables_on(device: torch.device, mask: Mask, n_keys: int) -> TokenTables:
    """The tables of a mask. No mode of torch may be active."""
    ids: tuple[torch.Tensor, torch.Tensor] | None = None
    of_query, of_key = document_tensors(mask)
    if of_query is not None and of_key is not None:
        query_ids = _with_entries(of_query, device)
        is_same = of_key is of_query
        ids = (query_ids, query_ids if is_same else _with_entries(of_key, device))
    is_there: torch.Tensor | None = None
    if mask.key_lengths is not None:
        columns = torch.arange(n_keys, device=device)
        lengths = mask.key_lengths.to(device).to(torch.int64)
        is_there = columns < lengths[:, None]
    if mask.key_padding is not None:
        padding = _with_entries(mask.key_padding, device)
        is_there = padding if is_there is None else is_there & padding
    return TokenTables(ids, is_there)


def _with_entries(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor (n,) or (batch, n) of numbers or bool on a device, with a dimension of
    entries."""
    placed = tensor.to(device)
    if placed.dtype not in (torch.bool, torch.int64):
        # torch compares no unsigned numbers with others.
        placed = placed.to(torch.int64)
    return placed.unsqueeze(0) if placed.dim() == 1 else placed


def _rows_at(table: torch.Tensor, entries: Tokens, tokens: Tokens) -> torch.Tensor:
    """The values in a table (1 or batch, n) of the tokens of cells: (cells or 1,
    tokens)."""
    rows = entries if len(table) > 1 else _ALL
    if isinstance(tokens, slice):
        return table[rows, tokens]
    if isinstance(entries, slice):
        return _gathered(table[rows], tokens)
    if isinstance(rows, slice):
        rows = torch.zeros_like(entries)
    return table[rows.unsqueeze(1), tokens]


def _gathered(rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The tokens (cells or 1, tokens) of rows (cells or 1, n)."""
    n_cells = max(len(rows), len(tokens))
    rows = rows.expand(n_cells, -1)
    tokens = tokens.expand(n_cells, -1)
    return rows.gather(1, tokens)


def _positions(tokens: Tokens, n_tokens: int, device: torch.device) -> torch.Tensor:
    """The positions of tokens, (cells or 1, tokens)."""
    if isinstance(tokens, torch.Tensor):
        return tokens
    return torch.arange(n_tokens, device=device)[tokens].unsqueeze(0)

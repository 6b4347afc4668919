"""Synthetic batches of token ids, with targets as in pre-training.

Token ids are drawn evenly from the model's vocabulary. Every sample has as many targets as any other, so that the mean
over a mini-batch's targets is the mean of its micro-batches' means: what pipelines and data parallelism need of a loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paradl_bench.core.errors import UserError

if TYPE_CHECKING:
    import torch

    Batch = tuple[torch.Tensor, torch.Tensor]

Shape = tuple[int, ...]
IGNORED = -100
"""A target that torch's cross-entropy leaves out."""
MASKED_SHARE = 0.15
"""Of the tokens of a sample, those that masked language models predict (Devlin et al. 2019, section 3.1)."""


class TokenTask(Protocol):
    """What a model that reads tokens is trained on."""

    def input_shape(self, asked: Shape | None) -> Shape:
        """Shape of one sample of token ids, from what the user asked for.

        Args:
            asked: ``(tokens,)``, or the shape itself; None for the model's own.

        Raises:
            UserError: no such shape, or more tokens than the model has positions for.
        """

    def make_batch(self, batch: int, shape: Shape, generator: torch.Generator) -> Batch:
        """Token ids (batch, *shape) and targets (batch, tokens), int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneSequence:
    """What tasks on one sequence share.

    Attributes:
        vocabulary: number of tokens. sequence: tokens of a sample where the user gives none. positions: the most
            tokens that the model takes; 0 for any number. window: how many tokens a layer attends to; 0 for all.
    """

    vocabulary: int
    sequence: int
    positions: int = 0
    window: int = 0

    def input_shape(self, asked: Shape | None) -> Shape:
        """``(tokens,)``."""
        shape = asked or (self.sequence,)
        if len(shape) != 1:
            raise _no_sequence(shape)
        tokens = shape[0]
        if self.positions and tokens > self.positions:
            raise UserError(f"--sequence {tokens}: it has positions for {self.positions} tokens")
        if self.window and tokens > self.window:
            raise UserError(
                f"--sequence {tokens}: its layers attend to the last {self.window} tokens alone, which is not traced:"
                f" give at most {self.window}"
            )
        if tokens < 2:
            raise UserError(f"--sequence {tokens}: a sequence has at least two tokens")
        return shape


def _no_sequence(shape: Shape) -> UserError:
    asked = "x".join(map(str, shape))
    return UserError(f"it reads token ids: give --sequence N, as 128, instead of --input-shape {asked}")


def _draw(vocabulary: int, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    import torch

    return torch.randint(0, vocabulary, shape, generator=generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class NextToken(OneSequence):
    """Each position predicts the token after it; samples are cut from sequences one token longer."""

    def make_batch(self, batch: int, shape: Shape, generator: torch.Generator) -> Batch:
        """Ids and, as targets, the same ids one position on."""
        tokens = _draw(self.vocabulary, (batch, shape[0] + 1), generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedTokens(OneSequence):
    """15% of the positions, at least one, as many in each sample, show the mask token and are predicted.

    Attributes:
        mask_token: id of the token that is shown. BERT leaves or replaces a fifth of the masked tokens instead, which
            changes no time.
    """

    mask_token: int

    def make_batch(self, batch: int, shape: Shape, generator: torch.Generator) -> Batch:
        """Ids with masks, and targets that are ``IGNORED`` where nothing is masked."""
        import torch

        tokens = _draw(self.vocabulary, (batch, *shape), generator)
        count = max(1, round(MASKED_SHARE * shape[0]))
        chosen = torch.rand((batch, *shape), generator=generator).argsort(1)[:, :count]
        masked = torch.zeros_like(tokens, dtype=torch.bool).scatter_(1, chosen, True)
        return tokens.masked_fill(masked, self.mask_token), tokens.masked_fill(~masked, IGNORED)


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoSequences:
    """An encoder's and a decoder's sequence, equally long: a sample is (2, tokens), the encoder's first.

    The decoder reads its targets one position late, behind a start token.

    Attributes:
        vocabulary: number of tokens. sequence: tokens of either where the user gives none. start_token: its id.
    """

    vocabulary: int
    sequence: int
    start_token: int

    def input_shape(self, asked: Shape | None) -> Shape:
        """``(2, tokens)``."""
        shape = asked or (self.sequence,)
        if len(shape) > 2 or (len(shape) == 2 and shape[0] != 2):
            raise _no_sequence(shape)
        return (2, shape[-1])

    def make_batch(self, batch: int, shape: Shape, generator: torch.Generator) -> Batch:
        """Ids of both sequences; targets are the decoder's own tokens."""
        import torch

        source, targets = _draw(self.vocabulary, (2, batch, shape[-1]), generator)
        start = torch.full((batch, 1), self.start_token)
        return torch.stack([source, torch.cat([start, targets[:, :-1]], 1)], 1), targets

"""Options of distillation: who teaches which prompts, and how much memory the teachers' weights may take."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

BY_TASK = "task"
Codec = Literal["exact", "fp8"]


class TeacherConfig(BaseModel):
    """One teacher: weights that this run holds (``source``), or a server that runs elsewhere (``url``)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Path | None = None
    """An HF directory, a finished run's folder (its final model), or one of its checkpoints (checkpoints/step_N)."""
    url: str | None = Field(None, pattern=r"^https?://")
    """An SGLang server; it scores at temperature 1 only, and gives the log-probs of sampled tokens only."""
    tokenizer: Path | None = None
    """HF directory of the server's tokenizer; needed with ``url``, since token ids are what it is sent."""
    prompts: tuple[str, ...] | None = Field(None, min_length=1)
    """Values of ``distillation.route`` whose prompts it teaches; null: the one that is its name."""
    weight: float = Field(1.0, gt=0)
    """Its share where a prompt has several teachers."""
    base: str | None = Field(None, min_length=1)
    """Overrides ``distillation.base``."""
    codec: Codec | None = None
    """Overrides ``distillation.codec``."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.source is None) == (self.url is None):
            raise ValueError("give source (an HF directory, a run's folder or a checkpoint) or url (an SGLang server)")
        if (self.url is None) != (self.tokenizer is None):
            raise ValueError("tokenizer goes with url: name the HF directory that the server's tokenizer is from")
        if self.url is not None and (self.base, self.codec) != (None, None):
            raise ValueError("base and codec are of weights that this run holds; a server (url) has none here")
        return self


class DistillationConfig(BaseModel):
    """How prompts find their teachers, and where the teachers' weights are meanwhile."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    route: str = BY_TASK
    """``task``: a prompt's teacher is chosen by its task; else the name of a column of the prompts' data."""
    store: Path | None = None
    """The teachers' weights on local NVMe, cut for the trainer's layout; null: in the run's folder. Runs can share
    one: a teacher whose source has not changed is not imported again."""
    base: str | None = Field(None, min_length=1)
    """What the teachers were fine-tuned from: the name of one of them, or a source as theirs. Of each tensor only what
    differs is kept, where that is smaller; what is equal takes nothing. The weights are the same bit for bit."""
    codec: Codec = "exact"
    """``fp8``: matrices in 8 bits with a scale a row, where no difference to a base is kept. Half the bytes to load or
    less, and not exact: the first batch measures what that does to the log-probs."""
    hbm_bytes: int = Field(2**30, gt=0)
    """Of one rank's GPU memory (on the CPU: of its memory) for teachers. Two should fit, or loads can't be hidden; one
    that does not fit streams, layer by layer."""
    pinned_bytes: int = Field(4 * 2**30, gt=0)
    """Of pinned host memory for one rank."""

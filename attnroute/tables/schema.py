"""The data model of the capability tables. `capability_tables/schema.json` is generated from it."""

from __future__ import annotations

import datetime
from functools import cached_property
from typing import Annotated, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from attnroute.tables import conditions, versions
from attnroute.tables.conditions import Compiled, Spec, compiled
from attnroute.tables.providers import Module, Provider
from attnroute.vocabulary import Device, EvidenceKind, Feature, Phase, Repair, RuleKind, RuleScope

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
BACKEND: Final = r"^[a-z][a-z0-9_]*$"
Backend = Annotated[str, StringConstraints(pattern=BACKEND)]
Shared = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*/[a-z][a-z0-9_]*$")]
Ranges = str | list[str]
Examples = str | Annotated[list[str], Field(min_length=1)]
OptionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]
OptionValue = bool | int | str
Seconds = Annotated[float, Field(ge=0.0, le=600.0)]


class Row(BaseModel):
    """A part of a table file: nothing in it changes, and no key is unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Evidence(Row):
    """Where a number comes from.

    `kind` is "measured" only when the kernel ran (`ref` names the data file), "probe" when a release binary's
    own check was asked without a GPU, "source" when it was read in that release's code, "issue" for a public
    report, "docs" for a vendor's page, "inferred" when nobody looked, "own" for attnroute's own code.
    """

    kind: EvidenceKind
    ref: str
    version: str | None = None
    date: datetime.date | None = None
    note: str | None = None


def _check_box(box: dict[str, Spec]) -> dict[str, Spec]:
    for field, spec in box.items():
        conditions.check(field, spec)
    return box


def _check_ranges(ranges: dict[str, Ranges]) -> dict[str, Ranges]:
    for name, option in ranges.items():
        if option == []:
            raise ValueError(f"{name} requires at least one range; got an empty list.")
        for text in [option] if isinstance(option, str) else option:
            versions.specifier(text)
    return ranges


def _check_known(known: dict[str, Ranges]) -> dict[str, Ranges]:
    for name, option in known.items():
        if versions.same_as(option):
            continue
        texts = [option] if isinstance(option, str) else option
        _check_ranges({name: [text.replace(versions.UNTESTED, "<1") for text in texts]})
    return known


Box = dict[str, Spec]
Versions = Annotated[dict[str, Ranges], AfterValidator(_check_ranges)]


class AnyOf(Row):
    """Several boxes, one of which must hold: for regions that are not rectangles."""

    any_of: list[Box]

    @field_validator("any_of")
    @classmethod
    def _known_fields(cls, boxes: list[Box]) -> list[Box]:
        return [_check_box(box) for box in boxes]


def boxes_of(part: Box | AnyOf | str) -> list[Box]:
    """Return the boxes of which one must hold; "never" has none."""
    if isinstance(part, str):
        return []
    return part.any_of if isinstance(part, AnyOf) else [part]


class _Guarded(Row):
    """What counts where `when`, `versions` and `phase` certainly hold."""

    name: Name
    versions: Annotated[Versions, Field(default_factory=dict)]
    phase: Phase | None = None
    when: Annotated[Box | AnyOf, Field(default_factory=dict)]
    because: str
    evidence: Annotated[list[Evidence], Field(min_length=1)]

    @field_validator("when")
    @classmethod
    def _known_fields(cls, value: Box | AnyOf) -> Box | AnyOf:
        return _check_box(value) if isinstance(value, dict) else value

    @cached_property
    def guard(self) -> Compiled:
        """`when`, compiled."""
        return compiled(boxes_of(self.when))


class Option(_Guarded):
    """Options that a kernel is given where `when`, `versions` and `phase` certainly hold, such as tile sizes.

    Every row that applies does, in order: `any/` first, then files that the architecture inherits or
    includes, its own last; a later row replaces what an earlier one says of the same name.

    Attributes:
        name: Unique among the rows of its file; the id is `<folder>/<backend>/<name>`, as a rule's.
        set: What the kernel is given, by the names that it knows.
        because: Why the row exists, as a clause for people.
    """

    set: Annotated[dict[OptionName, OptionValue], Field(min_length=1)]


class _Condition(Row):
    """One necessary condition: where `when`, `versions` and `phase` apply, `requires` must hold.

    Attributes:
        name: Unique among the rows about a backend in one folder; the id is `<folder>/<backend>/<name>`.
        kind: "limit", or a known fault: wrong_result, crash, hang, slow. A slow row never rejects.
        scope: "call" binds torch's own selector and our direct call of the operator; "stock" binds only the
            selector, because we do not go through it; "operator" binds only the direct call, because SDPA
            prepares it.
        repair: The preparation that lifts this row.
        because: Why the row exists, as a clause for people.
        argued: Why it refuses calls that were run beyond it and were right, as a sentence.
        refuses: Calls that this row rejects, each a call line, then ` on ` and what matters of the machine:
            `bf16 b2 hq8 sq512 d64 thd on sm_90 cudnn=9.15.0`. For checks and people; no decision reads it.
        takes: Calls that it lets pass, as near to those as can be.
        not_for: By the name of another backend with the same kernel, why the issues that are cited here say
            nothing of it.
    """

    name: Name
    kind: RuleKind = "limit"
    scope: RuleScope = "call"
    versions: Annotated[Versions, Field(default_factory=dict)]
    phase: Phase | None = None
    when: Annotated[Box | AnyOf, Field(default_factory=dict)]
    requires: Box | AnyOf | Literal["never"]
    repair: Repair | None = None
    because: str
    argued: str | None = None
    refuses: Examples | None = None
    takes: Examples | None = None
    not_for: Annotated[dict[Backend, str], Field(default_factory=dict)]
    recheck_after: datetime.date | None = None

    @field_validator("when", "requires")
    @classmethod
    def _known_fields(cls, value: Box | AnyOf | str) -> Box | AnyOf | str:
        return _check_box(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _faults_expire(self) -> Self:
        if self.kind != "limit" and self.recheck_after is None:
            msg = f'rule "{self.name}" requires recheck_after, because its kind is {self.kind}; got none.'
            raise ValueError(msg)
        return self

    @cached_property
    def guard(self) -> Compiled:
        """`when`, compiled."""
        return compiled(boxes_of(self.when))

    @property
    def is_absolute(self) -> bool:
        """Whether it rejects every call, whatever the versions are."""
        is_never = self.requires == "never" and self.kind != "slow"
        return is_never and self.phase is None and not self.versions and self.when == {}

    @cached_property
    def requirement(self) -> Compiled:
        """`requires`, compiled; "never" holds for no call."""
        return compiled(boxes_of(self.requires))


class Rule(_Condition):
    """A condition of one backend, in that backend's own file."""

    evidence: Annotated[list[Evidence], Field(min_length=1)]


class EvidenceAbout(Evidence):
    """Evidence of a row of several files; with `file` it is about that one alone."""

    file: Shared | None = None


class SharedRule(_Condition):
    """A condition that stands in several files for the same reason: it counts as a row of each.

    Attributes:
        files: Where it would stand, as `folder/name`; with the name of the row that is its id.
        evidence: At least one for each file.
    """

    files: Annotated[list[Shared], Field(min_length=2)]
    evidence: Annotated[list[EvidenceAbout], Field(min_length=1)]

    @model_validator(mode="after")
    def _evidence_for_each(self) -> Self:
        strange = [e.file for e in self.evidence if e.file not in (None, *self.files)]
        if strange:
            raise ValueError(f'rule "{self.name}" has evidence about {strange[0]}, which its files lack.')
        bare = [name for name in self.files if not self._evidence_of(name)]
        if bare:
            raise ValueError(f'rule "{self.name}" requires evidence about {bare[0]}; got none.')
        return self

    def rule_of(self, file: str) -> Rule:
        """Return the row as it would stand in one of its files."""
        parts = {name: value for name, value in self if name != "files"}
        return Rule.model_construct(**{**parts, "evidence": self._evidence_of(file)})

    def _evidence_of(self, file: str) -> list[EvidenceAbout]:
        return [item for item in self.evidence if item.file in (None, file)]


class SharedRules(Row):
    """`any/several.toml`: rows that hold in several files."""

    rule: Annotated[list[SharedRule], Field(min_length=1)]


class FeatureAnswer(Row):
    """Whether a backend's kernel can do something; `repair` names what makes a call without the need."""

    value: bool | Literal["unknown"]
    repair: Repair | None = None
    evidence: Annotated[list[Evidence], Field(min_length=1)]


class Shows(Row):
    """Calls that show which features a backend has; each is a call line, for checks and people.

    Attributes:
        takes: Calls that need none but features that it has.
        repaired: Calls that need one that it lacks, without which its repair does.
        refuses: Calls that need one that it lacks.
    """

    takes: Annotated[list[str], Field(default_factory=list)]
    repaired: Annotated[list[str], Field(default_factory=list)]
    refuses: Annotated[list[str], Field(default_factory=list)]


class Devices(Row):
    """The kinds of device that a backend has kernels for; on every other it is rejected."""

    kinds: Annotated[list[Device], Field(min_length=1)]
    evidence: Annotated[list[Evidence], Field(min_length=1)]


class BackendInfo(Row):
    """What holds for a backend everywhere.

    Attributes:
        title: The name people know it by.
        module: The module whose `executor` runs it; nothing is imported before the backend is first selected.
        provider: The distribution that ships it.
        needs: Every distribution or library that must be there.
        versions_known: No statement is made outside these ranges: the verdict there is unknown. `<untested`
            ends at the release that `releases.toml` names; `==name` asks for the version that another
            distribution has.
        operators: The operators whose appearance shows that this backend ran.
        kernels: Kernels that other backends run too, by a name that they all use: what is reported of one of
            these backends has to be said, or denied, of the others.
        memory: "linear" or "quadratic" in the sequence length.
        devices: The kinds of device that it runs on; absent where it runs on every one.
        first_call_seconds: How long the first call of each structure compiles, the least and the most that
            was seen, in seconds; absent where nothing is compiled.
    """

    title: str
    module: Module
    provider: str
    needs: list[str]
    versions_known: Annotated[dict[str, Ranges], AfterValidator(_check_known)]
    operators: list[str]
    kernels: Annotated[list[Name], Field(default_factory=list)]
    memory: Literal["linear", "quadratic"]
    devices: Devices | None = None
    first_call_seconds: tuple[Seconds, Seconds] | None = None

    def known(self, distribution: str) -> Ranges | None:
        """Return which versions somebody looked at, None where the table does not say."""
        ranges = self.versions_known.get(distribution)
        other = versions.same_as(ranges) if ranges is not None else None
        return ranges if other is None else self.versions_known.get(other)


class BackendTable(Row):
    """One `<backend>.toml`, or one file of `shared/`.

    Attributes:
        include: Other files, as `folder/name`, whose rules and options hold here too, with their own ids.
        included_by: The shipped files that include this one, so that none is dropped or added unnoticed.
        backend: In `any/` alone.
        provider: In `any/` alone, each distribution in one file: how it is found.
        needs: In an architecture's folder: what must be there in place of `needs` in `any/`.
        first_call_seconds: In an architecture's folder: in place of that in `any/`.
        features: Every feature in `any/`; in an architecture's folder those with another answer there.
        shows: Calls that show each answer in `features`.
        rule: The file's own rows.
        option: The file's own options.
    """

    include: Annotated[list[Shared], Field(default_factory=list)]
    included_by: Annotated[list[Shared], Field(default_factory=list)]
    backend: BackendInfo | None = None
    provider: Annotated[dict[str, Provider], Field(default_factory=dict)]
    needs: Annotated[list[str] | None, Field(min_length=1)] = None
    first_call_seconds: tuple[Seconds, Seconds] | None = None
    features: Annotated[dict[Feature, FeatureAnswer], Field(default_factory=dict)]
    shows: Shows | None = None
    rule: Annotated[list[Rule], Field(default_factory=list)]
    option: Annotated[list[Option], Field(default_factory=list)]


class Preference(_Guarded):
    """Backends that come first for one kind of call, in this order; those that it does not name keep theirs.

    Every row whose `versions`, `phase` and `when` certainly hold counts, and the one that stands first counts
    most: a backend stands where the first of them that names it puts it.

    Attributes:
        name: Unique within its file; the id is `<folder>/arch/<name>`.
        first: The backends, the best first.
        because: Why, as a clause for people.
    """

    first: Annotated[list[Backend], Field(min_length=1)]

    @field_validator("first")
    @classmethod
    def _each_once(cls, names: list[str]) -> list[str]:
        if len(set(names)) < len(names):
            raise ValueError("first requires each backend once.")
        return names

    @property
    def condition(self) -> tuple[object, ...]:
        """What must hold for the row to count; all of it is empty in a base order."""
        return self.versions, self.phase, self.when

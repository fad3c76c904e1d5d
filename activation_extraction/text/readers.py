"""Reads the content of rows that are not conversations: text, token ids, and ARC-AGI tasks.

Each class is a `Reader` for the `RowForm` of rows.py. chat.py has the reader of conversations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from activation_extraction.common.choices import ATTENTION_MASK
from activation_extraction.text.chat import ChatTemplate
from activation_extraction.text.rows import (
    READING_FLAGS,
    ColumnError,
    Columns,
    Content,
    UnusableRowError,
    column_of,
    kind_of_value,
    without_surrogates,
)


@dataclass(frozen=True)
class TextColumn:
    """Reads the text of a column.

    Attributes:
        name: The name of the column.
    """

    activity: ClassVar = "reading"
    name: str

    @property
    def columns(self) -> Columns:
        return Columns((self.name,))

    def can_read(self, row: Mapping[str, Any]) -> bool:
        return self.name in row

    def read(self, row: Mapping[str, Any]) -> Content | None:
        """Returns the text of a row; None if it is null or blank.

        Raises:
            ColumnError: If the column is missing, or holds conversations or token ids.
            UnusableRowError: If the column holds anything else that is not text.
        """
        text = column_of(row, self.name, "--text_column")
        if text is None:
            return None
        if not isinstance(text, str):
            message = f"--text_column {self.name}: expected text, found "
            kind = kind_of_value(text)
            if kind in READING_FLAGS:
                raise ColumnError(f"{message}{kind}; --{READING_FLAGS[kind]} {self.name} reads it")
            raise UnusableRowError(f"{message}{type(text).__name__} {text!r:.40}")
        return Content(without_surrogates(text)) if text.strip() else None


@dataclass(frozen=True)
class IdsColumn:
    """Reads token ids from a column, and the mask of those that may be kept from another column.

    Attributes:
        name: The name of the column of token ids.
        mask: The name of the column of masks, lists of 0 and 1; "" for none. If it is
            ATTENTION_MASK, 0 means padding, which is left out.
        vocabulary: The number of token ids that the model has.
    """

    activity: ClassVar = "reading"
    name: str
    mask: str
    vocabulary: int

    @property
    def columns(self) -> Columns:
        return Columns((self.name, self.mask) if self.mask else (self.name,))

    def can_read(self, row: Mapping[str, Any]) -> bool:
        return self.name in row

    def read(self, row: Mapping[str, Any]) -> Content | None:
        """Returns the token ids of a row; None if there are none.

        Raises:
            UnusableRowError: If a column is missing, if its values are not what is expected, or if
                a token id is outside the vocabulary.
        """
        values = column_of(row, self.name, "--ids_column")
        if values is None or values == []:
            return None
        ids = _integers(values, self.name, "--ids_column")
        mask = self._mask(row, len(ids)) if self.mask else None
        if mask is not None and self.mask == ATTENTION_MASK:
            if not mask.any():
                raise UnusableRowError(
                    f"--mask_column {self.mask}: each of its {len(mask)} values is 0, which says "
                    "that all is padding; expected a 1 for each token"
                )
            ids = ids[mask]  # before the ids are checked: padding may have any id
            mask = None
        if ids.min() < 0 or ids.max() >= self.vocabulary:
            invalid_id = int(ids.min() if ids.min() < 0 else ids.max())
            raise UnusableRowError(
                f"--ids_column {self.name}: token id {invalid_id}; the model has token ids 0 to "
                f"{self.vocabulary - 1}"
            )
        return Content(token_ids=ids.astype(np.int32), mask=mask)

    def _mask(self, row: Mapping[str, Any], length: int) -> np.ndarray:
        """Returns the mask of a row of `length` token ids, bool (length,)."""
        values = column_of(row, self.mask, "--mask_column")
        numbers = _integers(values, self.mask, "--mask_column")
        if len(numbers) != length or not np.isin(numbers, (0, 1)).all():
            raise UnusableRowError(
                f"--mask_column {self.mask}: expected {length} values, each 0 or 1, one for "
                f"each token id, found {len(numbers)}: {numbers[:8].tolist()}"
            )
        return numbers.astype(bool)


def _integers(values: Any, name: str, flag: str) -> np.ndarray:
    """Returns the values of a column as integers, int64 (values,).

    Args:
        values: The values, which should be a list of integers or booleans.
        name: The name of the column, for the message.
        flag: The flag that names the column, for the message.

    Raises:
        UnusableRowError: If the values are anything else.
    """
    try:
        array = np.array(values)
    except ValueError:  # lists of several lengths
        array = np.array(None)
    if isinstance(values, list) and array.ndim == 1 and array.dtype.kind in "bi":
        return array.astype(np.int64)
    raise UnusableRowError(
        f"{flag} {name}: expected a list of whole numbers, found {type(values).__name__} "
        f"{values!r:.40}"
    )


@dataclass(frozen=True)
class ArcTask:
    """Reads an ARC-AGI task as a prompt that shows its training pairs and asks for its tests.

    `RowForm` lists it after the reader of a column, for data sets without that column.

    Attributes:
        template: The template that renders the prompt as a message of the user; None for the prompt
            alone.
    """

    activity: ClassVar = "reading"
    template: ChatTemplate | None = None

    @property
    def columns(self) -> Columns:
        return Columns(("train", "test"), ids=("id", "task_id"))

    def can_read(self, row: Mapping[str, Any]) -> bool:
        return all(isinstance(row.get(name), list) for name in self.columns.required)

    def read(self, row: Mapping[str, Any]) -> Content:
        """Returns the prompt of a task.

        Raises:
            UnusableRowError: If the columns contain no grids, or if the template refuses the
                prompt.
        """
        prompt = _arc_prompt(row)
        if self.template is None:
            return Content(prompt)
        return self.template.content([{"role": "user", "content": prompt}])


def _arc_prompt(row: Mapping[str, Any]) -> str:
    """Returns the prompt for an ARC-AGI task: its training pairs, then each test input to solve.

    Each row of a grid is one line, with spaces between the cells, below a line "Input:" or
    "Output:". The outputs of the tests are left out.

    Raises:
        UnusableRowError: If the columns `train` and `test` contain no grids.
    """

    def lines(grid: list[list[int]]) -> str:
        return "\n".join(" ".join(map(str, row)) for row in grid)

    try:
        examples = [
            f"Example {number}\nInput:\n{lines(pair['input'])}\nOutput:\n{lines(pair['output'])}\n"
            for number, pair in enumerate(row["train"], start=1)
        ]
        tests = [
            f"Test {number}\nInput:\n{lines(pair['input'])}\nOutput:\n"
            for number, pair in enumerate(row["test"], start=1)
        ]
    except (KeyError, TypeError) as error:
        raise UnusableRowError(f"it has ARC-AGI columns but no grids in them: {error!r}") from error
    return "\n".join(examples + tests)

"""Reads the content of rows that are not conversations: text, token ids, and ARC-AGI tasks.

Each class reads one kind of content, and implements the protocol `Reader` of rows.py. chat.py
contains the reader of conversations.
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
        activity_phrase: Words that precede the position of a row in the log if the run makes no
            progress while the row is read (see `Reader`).
        column_name: Name of the column.
    """

    activity_phrase: ClassVar = "reading"
    column_name: str

    @property
    def columns(self) -> Columns:
        return Columns((self.column_name,))

    def can_read(self, row: Mapping[str, Any]) -> bool:
        return self.column_name in row

    def read(self, row: Mapping[str, Any]) -> Content | None:
        """Returns the text of a row; None if the text is null or blank.

        Args:
            row: The columns of the row by name.

        Raises:
            ColumnError: If the column is missing, or if it contains a conversation or token ids.
            UnusableRowError: If the column contains any other value that is not text.
        """
        column_value = column_of(row, self.column_name, "--text_column")
        if column_value is None:
            return None
        if not isinstance(column_value, str):
            beginning_of_message = f"--text_column {self.column_name}: expected text, found "
            value_type_phrase = kind_of_value(column_value)
            if value_type_phrase in READING_FLAGS:
                raise ColumnError(
                    f"{beginning_of_message}{value_type_phrase}; "
                    f"--{READING_FLAGS[value_type_phrase]} {self.column_name} reads it"
                )
            raise UnusableRowError(
                f"{beginning_of_message}{type(column_value).__name__} {column_value!r:.40}"
            )
        return Content(without_surrogates(column_value)) if column_value.strip() else None


@dataclass(frozen=True)
class IdsColumn:
    """Reads token ids from a column, and a mask of padding or context from another column.

    Attributes:
        activity_phrase: Words that precede the position of a row in the log if the run makes no
            progress while the row is read (see `Reader`).
        column_name: Name of the column with lists of token ids.
        mask_column: Name of the column with masks, which are lists of 0 and 1; "" for no mask. In
            the column ATTENTION_MASK, 0 means padding, which is removed from the token ids. In any
            other column, 0 means context, which the model reads but the run does not store.
        vocabulary_size: Number of token ids that the model has.
    """

    activity_phrase: ClassVar = "reading"
    column_name: str
    mask_column: str
    vocabulary_size: int

    @property
    def columns(self) -> Columns:
        return Columns(
            (self.column_name, self.mask_column) if self.mask_column else (self.column_name,)
        )

    def can_read(self, row: Mapping[str, Any]) -> bool:
        return self.column_name in row

    def read(self, row: Mapping[str, Any]) -> Content | None:
        """Returns the token ids of a row, without padding.

        Args:
            row: The columns of the row by name.

        Returns:
            The token ids, and the mask of the tokens whose activations may be stored. None if the
            column of token ids contains null or an empty list.

        Raises:
            UnusableRowError: If the column of token ids or of masks is missing or does not contain
                a list of integers, if the mask does not contain a 0 or 1 for each token id, if it
                marks all tokens as padding, or if a token id is outside the vocabulary.
        """
        ids_column_value = column_of(row, self.column_name, "--ids_column")
        if ids_column_value is None or ids_column_value == []:
            return None
        token_ids = _integer_array(ids_column_value, self.column_name, "--ids_column")
        storable_token_mask = None
        if self.mask_column == ATTENTION_MASK:
            non_padding_token_mask = self._mask_of_row(row, len(token_ids))
            if not non_padding_token_mask.any():
                raise UnusableRowError(
                    f"--mask_column {self.mask_column}: each of its {len(token_ids)} values is 0, "
                    "which says that all is padding; expected a 1 for each token"
                )
            # The tokens of padding are removed before the token ids are checked, because they may
            # have token ids that the model lacks.
            token_ids = token_ids[non_padding_token_mask]
        elif self.mask_column:
            storable_token_mask = self._mask_of_row(row, len(token_ids))
        if token_ids.min() < 0 or token_ids.max() >= self.vocabulary_size:
            token_id_to_report = int(token_ids.min() if token_ids.min() < 0 else token_ids.max())
            raise UnusableRowError(
                f"--ids_column {self.column_name}: token id {token_id_to_report}; the model has "
                f"token ids 0 to {self.vocabulary_size - 1}"
            )
        return Content(
            token_ids=token_ids.astype(np.int32), storable_token_mask=storable_token_mask
        )

    def _mask_of_row(self, row: Mapping[str, Any], num_token_ids: int) -> np.ndarray:
        """Returns the mask in the mask column of a row.

        Args:
            row: The columns of the row by name.
            num_token_ids: Number of token ids of the row.

        Returns:
            The mask, bool (num_token_ids,).

        Raises:
            UnusableRowError: If the column does not contain a 0 or 1 for each token id.
        """
        mask_column_value = column_of(row, self.mask_column, "--mask_column")
        mask_integers = _integer_array(mask_column_value, self.mask_column, "--mask_column")
        if len(mask_integers) != num_token_ids or not np.isin(mask_integers, (0, 1)).all():
            raise UnusableRowError(
                f"--mask_column {self.mask_column}: expected {num_token_ids} values, each 0 or 1, "
                f"one for each token id, found {len(mask_integers)}: {mask_integers[:8].tolist()}"
            )
        return mask_integers.astype(bool)


def _integer_array(value: Any, name: str, flag: str) -> np.ndarray:
    """Converts a list of integers or booleans into an array of integers, int64 (elements,).

    Args:
        value: The value of a column in one row, a list. False becomes 0, and True becomes 1.
        name: The name of the column, for the message.
        flag: The flag that names the column, for the message.

    Raises:
        UnusableRowError: If the value is not a list of integers or booleans, or if it is empty.
    """
    try:
        value_array = np.array(value)
    except ValueError:  # NumPy refuses nested lists of different lengths
        value_array = np.array(None)  # is no list of numbers, so the value is rejected below
    if isinstance(value, list) and value_array.ndim == 1 and value_array.dtype.kind in "bi":
        return value_array.astype(np.int64)
    raise UnusableRowError(
        f"{flag} {name}: expected a list of whole numbers, found {type(value).__name__} "
        f"{value!r:.40}"
    )


@dataclass(frozen=True)
class ArcTask:
    """Reads an ARC-AGI task, and writes it as a prompt that asks for the outputs of the tests.

    `RowSchema` lists this reader after the reader of a text or messages column, so this reader gets
    only rows without that column.

    Attributes:
        activity_phrase: Words that precede the position of a row in the log if the run makes no
            progress while the row is read (see `Reader`).
        template: Chat template that renders the prompt as a message of the user; None to use
            the prompt without a template.
    """

    activity_phrase: ClassVar = "reading"
    template: ChatTemplate | None = None

    @property
    def columns(self) -> Columns:
        return Columns(("train", "test"), id_columns=("id", "task_id"))

    def can_read(self, row: Mapping[str, Any]) -> bool:
        return all(
            isinstance(row.get(column_name), list) for column_name in self.columns.required_columns
        )

    def read(self, row: Mapping[str, Any]) -> Content:
        """Returns the prompt for the ARC-AGI task in a row.

        Args:
            row: The columns of the row by name.

        Raises:
            UnusableRowError: If the columns contain no grids, or if the chat template cannot render
                the prompt.
        """
        task_prompt = _arc_prompt(row)
        if self.template is None:
            return Content(task_prompt)
        return self.template.content([{"role": "user", "content": task_prompt}])


def _arc_prompt(row: Mapping[str, Any]) -> str:
    """Returns the prompt for an ARC-AGI task: the training pairs, then the input of each test.

    Each grid follows a line "Input:" or "Output:". A row of the grid is a line with spaces between
    the cells. The outputs of the tests are left out.

    Args:
        row: The columns of the task by name: `train` and `test`, each a list of pairs of grids.

    Raises:
        UnusableRowError: If the columns `train` and `test` contain no grids.
    """

    def grid_text(grid: list[list[int]]) -> str:
        grid_lines = [" ".join(map(str, grid_row)) for grid_row in grid]
        return "\n".join(grid_lines)

    try:
        prompt_sections = []
        for pair_number, grid_pair in enumerate(row["train"], start=1):
            input_grid_text = grid_text(grid_pair["input"])
            output_grid_text = grid_text(grid_pair["output"])
            prompt_sections.append(
                f"Example {pair_number}\nInput:\n{input_grid_text}\nOutput:\n{output_grid_text}\n"
            )
        for pair_number, grid_pair in enumerate(row["test"], start=1):
            prompt_sections.append(
                f"Test {pair_number}\nInput:\n{grid_text(grid_pair['input'])}\nOutput:\n"
            )
    except (KeyError, TypeError) as error:
        raise UnusableRowError(f"it has ARC-AGI columns but no grids in them: {error!r}") from error
    return "\n".join(prompt_sections)

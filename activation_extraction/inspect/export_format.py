"""Declares ExportFormat, which every format of --export implements.

export.py copies a run with a format. The formats are in sae_lens_files.py, draft_files.py,
latent_files.py and nla_files.py. They import optional packages inside the functions that need them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from activation_extraction.common.errors import InputError
from activation_extraction.common.visible import say
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.dataset.token_batch import TokenBatch


class Exported(NamedTuple):
    """The result of an export: the number of exported tokens, and the data that was left out.

    Attributes:
        num_tokens: The number of tokens in the exported files. If the rows of the files have a
            fixed length, it does not include tokens that were left out because they did not fill a
            row.
        omission_phrases: A phrase for each kind of other data of the run that was not exported,
            such as "3 samples without tokens".
    """

    num_tokens: int
    omission_phrases: tuple[str, ...] = ()


class ExportFormat(ABC):
    """A format of --export: files that another program reads, such as SAELens.

    Attributes:
        flag_value: The value of --export that chooses the format.
        needed_package: The name of the Python package that is needed to write the files.
        accepted_hooks_phrase: The hooks that the format accepts, in words for messages.
        needs_every_token: Whether a run must store all tokens of its samples.
        needs_sample_text: Whether the chunks that `write` takes contain, for each token, the text
            of its sample up to and including this token, in the column TEXT_COLUMN of nla_files.py.
        sample_table_column_names: The names of columns of the table of samples that the chunks
            contain in addition to the tokens. Empty for none.
        tokens_per_row: The number of tokens in a row of the files. Tokens that do not fill a row
            are left out.
        each_row_has_one_sample: Whether all tokens of a row belong to one sample. If so, the last
            tokens of each sample are left out if they do not fill a row. Otherwise a row may
            contain tokens of several samples, and only the last tokens of the run are left out.
        max_tokens_per_chunk: The largest number of tokens in a chunk, which is a batch of tokens
            that is written at once. None if only memory limits the number.
    """

    flag_value: ClassVar[str]
    needed_package: ClassVar[str]
    accepted_hooks_phrase: ClassVar[str]
    needs_every_token: ClassVar[bool] = False
    needs_sample_text: ClassVar[bool] = False
    sample_table_column_names: ClassVar[tuple[str, ...]] = ()
    tokens_per_row: ClassVar[int] = 1
    each_row_has_one_sample: ClassVar[bool] = False
    max_tokens_per_chunk: ClassVar[int | None] = None

    @abstractmethod
    def accepts(self, dataset: ActivationDataset, hook: str) -> bool:
        """Returns whether files in this format can contain the values of a hook.

        Args:
            dataset: The run.
            hook: The name of the hook.
        """

    def choose_hooks(self, dataset: ActivationDataset, chosen_hooks: Sequence[str]) -> list[str]:
        """Returns the names of the hooks to export, in the run's order.

        Chosen hooks that the format does not accept are left out, and a message names them.

        Args:
            dataset: The run.
            chosen_hooks: The names of the hooks that the user has chosen.

        Raises:
            InputError: If the format accepts none of the chosen hooks. Some formats have more
                conditions, for example that a single hook is chosen.
        """
        ordered_hook_names = [hook_name for hook_name in dataset.hooks if hook_name in chosen_hooks]
        exported_hook_names = [
            hook_name for hook_name in ordered_hook_names if self.accepts(dataset, hook_name)
        ]
        if not exported_hook_names:
            raise InputError(
                f"--export {self.flag_value}: takes {self.accepted_hooks_phrase}; "
                f"{dataset.url} has {', '.join(chosen_hooks)}"
            )
        if omitted_hook_names := [
            hook_name for hook_name in chosen_hooks if hook_name not in exported_hook_names
        ]:
            say(
                f"left out: {', '.join(omitted_hook_names)}; {self.flag_value} takes "
                f"{self.accepted_hooks_phrase}"
            )
        return exported_hook_names

    def token_bytes(self, dataset: ActivationDataset, hook: str) -> int:
        """Returns an upper bound for the bytes of a token's values at a hook.

        The bound holds for the values in memory and in the files. It limits the size of chunks, and
        shows whether the disk has enough free space.

        Args:
            dataset: The run.
            hook: The name of an exported hook.
        """
        return dataset.hooks[hook] * dataset.dtypes[hook].itemsize

    @abstractmethod
    def write(
        self,
        folder: Path,
        dataset: ActivationDataset,
        hooks: Sequence[str],
        chunks: Iterable[TokenBatch],
    ) -> Exported:
        """Writes the files of an export.

        Args:
            folder: The folder of the export, which is empty.
            dataset: The run.
            hooks: The names of the exported hooks.
            chunks: All tokens of the run, in stored order. The size of each chunk but the last is a
                multiple of the attribute `tokens_per_row`, the number of tokens in a row of the
                files.

        Returns:
            The number of exported tokens, and phrases about other data of the run that was not
            exported, for messages to the user.

        Raises:
            RunError: If the run contains values that the files cannot contain.
        """

    @abstractmethod
    def usage_lines(
        self, folder: str, dataset: ActivationDataset, hooks: Sequence[str]
    ) -> list[str]:
        """Returns lines of Python or shell that open the files with the library of this format.

        Args:
            folder: The folder of the export.
            dataset: The run that was exported.
            hooks: The names of the exported hooks.
        """

"""Lists choices and defaults of flags that several packages use.

cli/flags.py declares the flags, and also the choices and defaults that only one package uses.
"""

# The name of a column of a data set. Its values are masks of token ids, in which 0 means padding.
ATTENTION_MASK = "attention_mask"
# The layers that are stored by default. A model with fewer layers stores its last layer instead of
# the missing layers.
DEFAULT_LAYERS = range(10, 24)
# The default of --top_logits, the number of most likely next tokens at the hook `logits.top_ids`.
DEFAULT_TOP_LOGITS = 10
MESH_AXES = ("pipeline", "data", "fsdp", "expert", "model")
SHARD_FORMATS = ("pickle", "safetensors")
# The values of --export. inspect/export_format.py names the modules that write the files.
EXPORTS = ("sae_lens", "speculators", "specforge", "delphi", "nla")
# The columns that every table of samples has.
SAMPLE_COLUMNS = ("sample_idx", "tokens", "doc_id", "row", "cut", "text_preview")
# The largest number of columns of the data set that a run can add to its tables of samples.
MAX_COLUMNS = 64
# Roles of a conversation's tokens. "template" is the role of tokens that the chat template adds
# between the turns. A role is stored as its index in this tuple, so the order must not change.
ROLES = ("template", "system", "user", "assistant", "thinking", "tool")
# The protocols of the URLs of buckets to which shards can be written.
BUCKET_PROTOCOLS = ("gs", "gcs", "s3", "s3a", "az", "abfs", "abfss")

"""Lists choices and defaults of flags that several rooms use."""

ATTENTION_MASK = "attention_mask"  # the name of a column of masks in which 0 means padding
DEFAULT_LAYERS = range(10, 24)  # clipped to the model's depth
DEFAULT_TOP_LOGITS = 10  # the number of most likely next tokens that `logits.top_ids` contains
MESH_AXES = ("pipeline", "data", "fsdp", "expert", "model")
SHARD_FORMATS = ("pickle", "safetensors")
# The forms of --export, which inspect/trainer_files.py lists.
EXPORTS = ("sae_lens", "speculators", "specforge", "delphi", "nla")
# Columns of all tables of samples. A run may add up to MAX_COLUMNS columns of the data set.
SAMPLE_COLUMNS = ("sample_idx", "tokens", "doc_id", "row", "cut", "text_preview")
MAX_COLUMNS = 64
# Roles of a conversation's tokens. "template" is the role of tokens that the chat template adds
# between the turns. A role is stored as its index in this tuple, so the order must not change.
ROLES = ("template", "system", "user", "assistant", "thinking", "tool")
# The protocols of the URLs of buckets to which shards can be written.
BUCKET_PROTOCOLS = ("gs", "gcs", "s3", "s3a", "az", "abfs", "abfss")

"""This module lists the values that flags offer and that other folders know by the same names."""

ATTENTION_MASK = "attention_mask"  # the name of a column of masks whose zeros are padding
DEFAULT_LAYERS = range(10, 24)  # clipped to the model's depth
DEFAULT_TOP_LOGITS = 10  # how many of the most likely next tokens `logits.top_ids` has
MESH_AXES = ("pipeline", "data", "fsdp", "expert", "model")
SHARD_FORMATS = ("pickle", "safetensors")
EXPORTS = ("sae_lens", "speculators", "specforge", "delphi")  # inspect/trainer_files.py writes them
# The columns of every table of samples; a run may keep up to MAX_COLUMNS of the data set's beside.
SAMPLE_COLUMNS = ("sample_idx", "tokens", "doc_id", "row", "cut", "text_preview")
MAX_COLUMNS = 64
# What a token of a conversation belongs to; "template" is what the chat template adds between the
# turns. A role is stored as its index here, so the order stays.
ROLES = ("template", "system", "user", "assistant", "thinking", "tool")
BUCKET_PROTOCOLS = ("gs", "gcs", "s3", "s3a", "az", "abfs", "abfss")  # of URLs that are written to

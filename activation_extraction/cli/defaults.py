"""What stands in for flags that are not given: defaults and environment variables.

Each is stated only here; both the help and the configuration take it from here.
"""

from typing import Any

DATASET = ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train")  # name, config, split
DEFAULT_LAYERS = range(10, 24)  # clipped to the model's depth
DEMO_MAX_SEQ_LENGTH = 256
DEFAULTS: dict[str, Any] = {
    "model_path": "Qwen/Qwen2.5-0.5B",
    "dtype": "auto",
    "activation_type": "residual",
    "positions": "all",
    "text_column": "text",
    "machine_id": 0,
    "total_machines": 1,
    "batch_size": 8,
    "max_seq_length": 2048,
    "mesh_type": "2d",
    "connect_timeout": 300,
    "heartbeat_timeout": 100,
    "stall_timeout": 600,
    "output_dir": "activations",
    "min_free_gb": 0.0,
    "activation_dtype": "auto",
    "shard_size_gb": 1.0,
    "shard_format": "pickle",
    "gcs_prefix": "activations",
    "upload_timeout": 300,
    "verify_samples": 8,
    "log_every": 30,
}
# Flag -> the environment variables that fill it in; the first one that is set counts.
ENVIRONMENT = {
    "coordinator_address": ("JAX_COORDINATOR_ADDRESS", "COORDINATOR_ADDRESS"),
    "host_id": ("JAX_PROCESS_INDEX", "HOST_ID"),
    "num_hosts": ("JAX_PROCESS_COUNT", "NUM_HOSTS"),
    "mesh_shape": ("TPU_MESH_CONFIG",),
    "mesh_axes": ("TPU_AXIS_NAMES",),
    "compilation_cache": ("JAX_COMPILATION_CACHE_DIR",),
}
ONLY_MULTIHOST = ("coordinator_address", "host_id", "num_hosts")

# The extraction with its dependencies, for one kind of accelerator (tpu, gpu or cpu):
#
#     docker build --build-arg ACCELERATOR=tpu -t IMAGE .
#     docker run --rm --init --privileged --net=host --shm-size=16g IMAGE --multihost --model_path ...
#     docker run --rm --init --privileged --net=host --shm-size=16g IMAGE -c "ls; python --version"
#
# On a TPU VM the container needs
#   --privileged     to open the TPU's device files and to lock its memory
#   --net=host       because the hosts of a pod, and the chips between them, reach each other under
#                    the VM's own addresses, and the VM's metadata server says which host this is
#   --shm-size=16g   because libtpu and the readers of data share memory in /dev/shm (Docker: 64 MB)
#   --init           so that SIGTERM reaches the program at any time: process 1 ignores it by default
# On a GPU machine --gpus all takes the place of --privileged; on a CPU none of them is needed.
# Keep the output outside, and what would be fetched and compiled again at every start:
#   -v ~/.cache/huggingface:/cache/huggingface
#   -v ~/.cache/activation_extraction:/cache/activation_extraction

FROM python:3.11.13-slim-bookworm

# What changes least comes first: a change to the scripts must not install everything again.
ENV HF_HOME=/cache/huggingface \
    XDG_CACHE_HOME=/cache \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /workspace

ARG ACCELERATOR=tpu
COPY requirements.txt ./
COPY deploy/requirements-tpu.txt deploy/requirements-gpu.txt deploy/
# Wheels only: nothing is compiled, so no compiler has to be installed and removed again.
RUN case "$ACCELERATOR" in \
        cpu) file=requirements.txt ;; \
        tpu | gpu) file=deploy/requirements-$ACCELERATOR.txt ;; \
        *) echo "ACCELERATOR=$ACCELERATOR: must be cpu, tpu or gpu" >&2; exit 2 ;; \
    esac \
    && pip install --no-cache-dir --only-binary=:all: --requirement "$file"

COPY . ./
ENTRYPOINT ["/workspace/deploy/entrypoint.sh"]

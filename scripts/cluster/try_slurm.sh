#!/usr/bin/env bash
# Tries lesson.slurm under a real Slurm, which it starts itself: on two machines made of one, as
# scripts/two_machines.sh makes them.
#   sudo bash scripts/cluster/try_slurm.sh [WHAT] [flags]        default: 02
# It needs Linux, root, and slurmctld, slurmd, sbatch and munged (Debian, Ubuntu: apt install
# slurmctld slurmd slurm-client munge). A Slurm that is already here is left alone, and everything
# ends with this script, also after Ctrl-C.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../two_machines.sh" slurm "${@:-02}"

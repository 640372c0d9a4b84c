#!/bin/sh
# Slurm: `Epilog=/etc/slurm/epilog.d/ckptstore-gc.sh` (slurm.conf); runs as root on each node when a job has ended.
#
# Collects what the job's user has in the stores of /etc/ckptstore/stores (a place a line), once per job, on the
# first node of the job. It never fails: an epilog that ends with another code than 0 drains the node. It is cut
# off after two minutes, which is safe at any instant; the nightly round does what is left.

PATH=/usr/sbin:/usr/bin:/sbin:/bin
CKPTSTORE=${CKPTSTORE_PROGRAM:-/opt/ckptstore/bin/ckptstore}
STORES=${CKPTSTORE_STORES:-/etc/ckptstore/stores}
SECONDS_EACH=120

[ -n "$SLURM_JOB_USER" ] && [ -r "$STORES" ] || exit 0

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" 2>/dev/null | head -n 1)
[ -z "$first" ] || [ "$first" = "$SLURMD_NODENAME" ] || exit 0

while IFS= read -r store; do
    case $store in '' | '#'*) continue ;; esac
    said=$(timeout "$SECONDS_EACH" runuser -u "$SLURM_JOB_USER" -- \
        "$CKPTSTORE" -s "$store" gc --grace 2d --max-delete 30% --time-budget 60s 2>&1 </dev/null)
    code=$?
    # 11: it runs already. 3: time was up. 124: it was cut off here.
    case $code in
    0 | 3 | 11 | 124) ;;
    *) logger -t ckptstore-gc -p daemon.warning "job $SLURM_JOB_ID: $store: ended with $code: $said" ;;
    esac
done <"$STORES"
exit 0

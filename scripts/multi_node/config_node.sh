# bash runs this on every node before its ranks start, and they get its exports: settings that the
# node's network needs and that were not detected (master_launch --dry-run shows the detected ones).
# Exports override detected settings and the config's env: and nccl:, but not --env.
# NODE_RANK (0, 1, ...) and NODE_IP identify the node.
# If it exits or its last command fails, nothing is started on any node.
# While it contains only comments, it is not run at all.

# export NCCL_DEBUG=INFO
# export NCCL_IB_HCA=mlx5_0,mlx5_1
# if [ "$NODE_RANK" = 0 ]; then export NCCL_SOCKET_IFNAME=eth1; fi
# source /opt/hpcx/hpcx-init.sh && hpcx_load

# Runs on every node before its ranks start, in bash, and what it exports they get: settings that
# the network of a node asks for and that were not found by themselves (master_launch --dry-run
# shows those that were). Exports win over what was found and over the config's env: and nccl:,
# but not over --env. NODE_RANK (0, 1, ...) and NODE_IP tell which node it is.
# Where it exits or its last command fails, nothing is started on any node.
# As long as there are only comments here, it is not run at all.

# export NCCL_DEBUG=INFO
# export NCCL_IB_HCA=mlx5_0,mlx5_1
# if [ "$NODE_RANK" = 0 ]; then export NCCL_SOCKET_IFNAME=eth1; fi
# source /opt/hpcx/hpcx-init.sh && hpcx_load

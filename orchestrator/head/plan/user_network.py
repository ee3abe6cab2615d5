"""The network's variables that a user sets: those that fit nothing there, or that nobody reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from orchestrator.common.errors import nearest
from orchestrator.head.nodes.facts import ProbedNode
from orchestrator.head.plan.model import EnvSetting, NodePlan
from orchestrator.head.plan.nccl_env import is_unmatched

# Of NCCL, RCCL's plugins and torch; an unknown one is only said where one of these is near.
NAMES = """
NCCL_ALGO NCCL_ALLOC_P2P_NET_LL_BUFFERS NCCL_ASYNC_ERROR_HANDLING NCCL_AVOID_RECORD_STREAMS
NCCL_BLOCKING_WAIT NCCL_BUFFSIZE NCCL_CGA_CLUSTER_SIZE NCCL_CHECKS_DISABLE NCCL_CHECK_POINTERS
NCCL_COLLNET_ENABLE NCCL_COLLNET_NODE_THRESHOLD NCCL_COMM_BLOCKING NCCL_COMM_ID NCCL_CROSS_NIC
NCCL_CTA_POLICY NCCL_CUMEM_ENABLE NCCL_CUMEM_HOST_ENABLE NCCL_DEBUG NCCL_DEBUG_FILE
NCCL_DEBUG_SUBSYS NCCL_DESYNC_DEBUG NCCL_DMABUF_ENABLE NCCL_ENABLE_TIMING NCCL_GDR_FLUSH_DISABLE
NCCL_GRAPH_DUMP_FILE NCCL_GRAPH_FILE NCCL_GRAPH_MIXING_SUPPORT NCCL_GRAPH_REGISTER NCCL_HOSTID
NCCL_IB_ADAPTIVE_ROUTING NCCL_IB_ADDR_FAMILY NCCL_IB_ADDR_RANGE NCCL_IB_AR_THRESHOLD
NCCL_IB_CUDA_SUPPORT NCCL_IB_DATA_DIRECT NCCL_IB_DISABLE NCCL_IB_ECE_ENABLE NCCL_IB_FIFO_TC
NCCL_IB_GID_INDEX NCCL_IB_HCA NCCL_IB_MERGE_NICS NCCL_IB_MERGE_VFS NCCL_IB_MQP_RETRY_ALL
NCCL_IB_PCI_RELAXED_ORDERING NCCL_IB_PKEY NCCL_IB_QPS_PER_CONNECTION NCCL_IB_RETRY_CNT
NCCL_IB_RETURN_ASYNC_EVENTS NCCL_IB_ROCE_VERSION_NUM NCCL_IB_SL NCCL_IB_SPLIT_DATA_ON_QPS
NCCL_IB_TC NCCL_IB_TIMEOUT NCCL_IB_USE_INLINE NCCL_IGNORE_CPU_AFFINITY NCCL_IGNORE_DISABLED_P2P
NCCL_LAUNCH_MODE NCCL_LAUNCH_ORDER_IMPLICIT NCCL_LOCAL_REGISTER NCCL_MAX_CTAS NCCL_MAX_NCHANNELS
NCCL_MAX_P2P_NCHANNELS NCCL_MAX_RINGS NCCL_MIN_CTAS NCCL_MIN_NCHANNELS NCCL_MIN_P2P_NCHANNELS
NCCL_MIN_RINGS NCCL_MNNVL_CLIQUE_ID NCCL_MNNVL_ENABLE NCCL_MNNVL_UUID NCCL_NET NCCL_NETDEVS_POLICY
NCCL_NET_DISABLE_INTRA NCCL_NET_FORCE_FLUSH NCCL_NET_FORCE_MERGE NCCL_NET_GDR_C2C
NCCL_NET_GDR_LEVEL NCCL_NET_GDR_READ NCCL_NET_MERGE_LEVEL NCCL_NET_OVERHEAD NCCL_NET_PLUGIN
NCCL_NET_SHARED_BUFFERS NCCL_NET_SHARED_COMMS NCCL_NSOCKS_PERTHREAD NCCL_NTHREADS NCCL_NVB_DISABLE
NCCL_NVLSTREE_MAX_CHUNKSIZE NCCL_NVLS_CHUNKSIZE NCCL_NVLS_ENABLE NCCL_NVLS_NCHANNELS
NCCL_OOB_NET_ENABLE NCCL_OOB_NET_IFNAME NCCL_P2P_DIRECT_DISABLE NCCL_P2P_DISABLE NCCL_P2P_LEVEL
NCCL_P2P_NET_CHUNKSIZE NCCL_P2P_NVL_CHUNKSIZE NCCL_P2P_PCI_CHUNKSIZE NCCL_P2P_PXN_LEVEL
NCCL_P2P_READ_ENABLE NCCL_P2P_USE_CUDA_MEMCPY NCCL_PROFILER_PLUGIN NCCL_PROGRESS_APPENDOP_FREQ
NCCL_PROTO NCCL_PXN_DISABLE NCCL_RAS_ADDR NCCL_RAS_ENABLE NCCL_RAS_TIMEOUT_FACTOR NCCL_RINGS
NCCL_RUNTIME_CONNECT NCCL_SET_STACK_SIZE NCCL_SHM_DISABLE NCCL_SHM_USE_CUDA_MEMCPY
NCCL_SINGLE_RING_THRESHOLD NCCL_SOCKET_FAMILY NCCL_SOCKET_IFNAME NCCL_SOCKET_NTHREADS
NCCL_SOCKET_POLL_TIMEOUT_MSEC NCCL_SOCKET_RETRY_CNT NCCL_SOCKET_RETRY_SLEEP_MSEC
NCCL_THREAD_THRESHOLDS NCCL_TIMEOUT NCCL_TOPO_DUMP_FILE NCCL_TOPO_FILE NCCL_TRACE_BUFFER_SIZE
NCCL_TUNER_CONFIG_PATH NCCL_TUNER_PLUGIN NCCL_UID_STAGGER_RATE NCCL_UID_STAGGER_THRESHOLD
NCCL_USE_COMM_NONBLOCKING NCCL_WIN_ENABLE NCCL_WIN_STRIDE NCCL_WORK_ARGS_BYTES
NCCL_WORK_FIFO_BYTES NCCL_ZERO_CTA_POLICY GLOO_SOCKET_IFNAME GLOO_DEVICE_TRANSPORT
TP_SOCKET_IFNAME UCX_NET_DEVICES UCX_TLS
"""
KNOWN = frozenset(NAMES.split())
FAMILIES = ("NCCL_", "GLOO_", "TP_")
NEAR = 3  # characters that a misspelt name has too many, too few or otherwise
OF_THE_LAUNCH = {  # what a launch sets for each rank, whatever else they are given
    "MASTER_ADDR": "the first node of the list is the master",
    "MASTER_PORT": "--master-port chooses it",
    "WORLD_SIZE": "--nproc and --nnodes choose it",
    "RANK": "the order of the node list numbers the nodes",
    "LOCAL_RANK": "--nproc N starts N ranks per node",
    "NODE_RANK": "the order of the node list numbers the nodes",
}


def warnings(nodes: Iterable[tuple[ProbedNode, NodePlan]]) -> list[str]:
    """Warn of what a user set, and that fits nothing on a node or has no effect."""
    found: dict[str, None] = {}
    for machine, node in nodes:
        for setting in node.settings:
            if setting.yours and node.env.get(setting.name) == setting.value:
                found.update(dict.fromkeys(problems_there(setting, machine)))
            if setting.yours:
                found.update(dict.fromkeys(problems_anywhere(setting)))
    return [f"WARNING: {problem}" for problem in found]


def problems_there(setting: EnvSetting, machine: ProbedNode) -> Iterator[str]:
    name, value = setting.name, setting.value
    shown = f"{name}={value} ({setting.why})"
    if is_unmatched(name, value, machine):
        has = ", ".join(sorted({item.interface for item in machine.facts.addresses}))
        yield f"{shown} fits no interface of {machine.name}: {has}"
    elif name in ("NCCL_IB_HCA", "UCX_NET_DEVICES") and not fits_a_device(name, value, machine):
        cards = ", ".join(sorted({port.device for port in machine.facts.rdma}))
        has = cards or "it has no InfiniBand or RoCE"
        yield f"{shown} fits no device of {machine.name}: {has}"


def fits_a_device(name: str, value: str, machine: ProbedNode) -> bool:
    """Tell whether a list of cards names one that is there, as NCCL or UCX reads it."""
    cards = {port.device for port in machine.facts.rdma}
    words = [word.partition(":")[0] for word in value.lstrip("^=").split(",") if word]
    if name == "UCX_NET_DEVICES":
        cards |= {interface.name for interface in machine.facts.interfaces}
        cards |= {address.interface for address in machine.facts.addresses}
        return "all" in words or any(word in cards for word in words)
    exact = "=" in value[:2]
    if value.startswith("^") or not words:
        return True
    return any(card == word if exact else card.startswith(word) for card in cards for word in words)


def problems_anywhere(setting: EnvSetting) -> Iterator[str]:
    name = setting.name
    if name in OF_THE_LAUNCH:
        yield f"{name} ({setting.why}) does not reach the ranks: {OF_THE_LAUNCH[name]}"
    elif name.startswith(FAMILIES) and name not in KNOWN:
        near = [known for known in KNOWN if distance(name, known) <= NEAR]
        meant = nearest(name, near)
        if meant:
            yield f"nothing reads {name} ({setting.why}){meant}"


def distance(first: str, second: str) -> int:
    """Return how many characters have to be put in, left out or changed."""
    if abs(len(first) - len(second)) > NEAR:
        return NEAR + 1
    row = list(range(len(second) + 1))
    for number, one in enumerate(first, 1):
        before, row[0] = row[0], number
        for at, other in enumerate(second, 1):
            before, row[at] = row[at], min(before + (one != other), row[at] + 1, row[at - 1] + 1)
    return row[-1]

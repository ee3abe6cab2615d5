"""Which tests each gear runs; tests/README.md says what the gears are for.

Every test is marked `fast`, `long` or neither, so that `-m fast` is the first gear, `-m "not long"`
the second, and no -m at all the third. An entry of a table below is the beginning of a test's id.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import hypothesis
import pytest

EXAMPLES = 100  # of a property that names no number
SHARE = 5  # the first two gears try one example of so many

# Fixtures: whoever uses one of these waits for real hosts, for a job with its supervisor, for a
# node's program or for ranks that import torch.
CLUSTERS = {
    *("two_nodes", "netns_cluster", "loopback_cluster", "slurm", "machines", "of_three_ranks"),
    *("new_job", "new_link"),
}

# One by one they take too long for the first gear: they start clusters or jobs of their own, ranks
# that import torch, an environment to install.
SLOW = [
    "tests/head/environments/test_make.py",
    "tests/head/commands/sweep/test_sweep.py::test_ten_thousand",
    "tests/head/environments/test_requirements.py::test_settings_of_pip_are_uv_s_too",
    "tests/head/environments/test_requirements.py::test_wheels_are_downloaded_once",
    "tests/head/environments/test_hashes.py::test_a_wheel_without_any_of_its_hashes_is_refused",
    "tests/head/commands/kept/test_prune.py::test_many_prunes_at_once",
    "tests/head/commands/kept/test_prune.py::test_pins",
    "tests/node/job/test_ends.py::test_a_proof_is_true",
    "tests/records/test_checkpoint_store.py::test_a_thousand",
    "tests/records/test_checkpoint_store.py::test_sigkill",
    "tests/scripts/test_make_tokens.py",
    "tests/views/track/test_passing_on.py::test_every_trainer",
    "tests/views/track/test_passing_on.py::test_a_file_that_was_cut_off",
    "tests/api/test_functions.py::test_a_child_of_the_program",
    "tests/clusters/",
    "tests/node/job/test_fast_torchrun.py::test_torchrun_asks_no_name_server",
    "tests/node/job/test_fast_torchrun.py::test_the_master",
    "tests/end_to_end/",
    "tests/engine/data/test_data.py::test_every_sample_comes_everywhere",
    "tests/engine/data/test_data.py::test_workers_end_with_a_rank_that_is_killed",
    "tests/engine/saving/test_export.py::test_memory_is_that_of",
    "tests/engine/saving/test_export.py::test_the_newest_that_verifies",
    "tests/engine/models/test_model.py::test_blocks_compile",
    "tests/engine/models/test_model.py::test_a_mesh_of_any_shape_begins",
    "tests/engine/models/test_ranking.py::test_it_learns",
    "tests/engine/models/test_target.py::test_the_example_of_the_docs",
    "tests/head/commands/kept/test_prune.py::test_interrupted_anywhere",
    "tests/head/commands/kept/test_prune.py::test_machines_of_a_record_that_nobody_here_wrote",
    "tests/head/connect/test_channel.py::test_the_engine_and_a_users_imports",
    "tests/head/connect/test_openssh.py",
    "tests/head/connect/test_server_command.py",
    "tests/head/connect/test_ssh_verdicts.py",
    "tests/head/plan/test_plan.py::test_torchrun_understands",
    "tests/head/screen/test_screen.py::test_a_terminal_far_behind",
    "tests/head/transfer/test_push.py",
    "tests/head/transfer/test_send.py",
    "tests/head/transfer/test_spread.py",
    "tests/views/dashboard/test_browser.py",
    "tests/views/report/test_browser.py",
    "tests/views/report/test_members.py::test_it_is_drawn",
    "tests/views/dashboard/test_app.py::test_one_that_is_removed_while",
    "tests/views/dashboard/test_app.py::test_what_is_appended_is_seen",
    "tests/views/top/test_screen.py",
    "tests/views/top/test_terminal.py",
    "tests/views/track/test_passing_on.py::test_each_line_once",
    "tests/launchers/test_accelerate.py::test_another_machine_rank_by_hand",
    "tests/launchers/test_accelerate.py::test_by_hand_the_nodes",
    "tests/launchers/test_accelerate.py::test_the_files_for_each_node",
    "tests/launchers/test_accelerate.py::test_what_node_0_refuses",
    "tests/launchers/test_containers.py::test_compose_runs",
    "tests/local_cluster/",
    "tests/node/machine/test_checkup.py::test_torch_as_it_really_is",
    "tests/node/machine/test_software.py::test_torch_is_read_not_imported",
    "tests/node/job/test_interleaving.py",
    "tests/node/job/test_programs.py",
    "tests/node/job/test_rank.py",
    "tests/node/job/test_supervisor.py",
    "tests/node/server/test_server.py::test_what_is_shipped",
    "tests/node/warm/test_same_start.py",
    "tests/node/test_install.py",
    "tests/node/warm/test_warm.py",
    "tests/records/test_checkpoint_store.py::test_pruning_keeps_its_promise",
    "tests/records/test_goodput.py::test_a_job_of_many_days",
    "tests/scripts/test_gpu_checks.py::test_without_cuda",
    "tests/scripts/test_pictures.py",
    "tests/scripts/test_scripts.py::test_a_fresh_clone",
    "tests/scripts/test_site.py",
    "tests/scripts/test_wheel.py",
]

ONE_RUN_PER_KEY = "observed"  # a fixture: who uses it is in the last gear

# What the second gear proves with fewer cases, or proves at a lower level.
LONG = [
    "tests/test_booted.py",
    "tests/end_to_end/test_bootstrap.py",
    "tests/clusters/test_clusters.py::test_sixty_four_hosts",
    "tests/end_to_end/test_chaos.py",
    "tests/engine/sharding/test_many_ranks.py",
    "tests/engine/saving/test_resume.py::test_one_training_moves",
    "tests/end_to_end/test_checkpoint_parts.py",
    "tests/end_to_end/test_connections.py::test_sixty_four_nodes",
    "tests/end_to_end/test_fanout.py::test_a_firewall_and_a_host_that_is_lost",
    "tests/end_to_end/test_fanout.py::test_a_push_past_a_firewall",
    "tests/end_to_end/test_frameworks.py",
    "tests/end_to_end/test_no_seam.py::test_six_faults_leave_no_trace",
    "tests/end_to_end/test_programs.py",
    "tests/launchers/test_slurm.py::test_a_job_that_slurm_takes_back",
    "tests/launchers/test_slurm.py::test_a_limit_that",
    "tests/trackers/test_known.py::test_a_run_that_goes_on",  # their packages are many
    "tests/trackers/test_known.py::test_mlflow_has",
    "tests/trackers/test_known.py::test_wandb_has",
    *(
        f"tests/end_to_end/test_end.py::test_a_failing_rank_ends_the_job_everywhere[{case}"
        for case in ("plain", "fork-kill", "fork-exit")
    ),
    *(
        f"tests/end_to_end/test_end.py::test_ctrl_c_ten_times_at_any_moment[{after}]"
        for after in (0.1, 0.3, 0.8, 1.8)
    ),
    "tests/end_to_end/test_end.py::test_a_failure_among_ranks_that_ignore_sigterm",
    "tests/end_to_end/test_end.py::test_a_terminal_that_is_closed_leaves_the_job[ready]",
    "tests/end_to_end/test_end.py::test_who_vanishes_before_its_start_is_proved_once_it_is_back[power]",
    "tests/end_to_end/test_end.py::test_ctrl_c_once_asks",  # test_launched.py has it of the engine
    "tests/end_to_end/test_hang.py::test_a_master_port_that_is_closed",
    *(
        f"tests/end_to_end/test_hang.py::test_who_keeps_the_others_waiting[{place}]"
        for place in ("elsewhere", "together", "stopped", "never comes")
    ),
    "tests/end_to_end/test_launch.py::test_a_module_gets_all_that_follows_it",
    "tests/end_to_end/test_launch.py::test_a_program_is_given_its_arguments_and_environment[plain]",
    "tests/end_to_end/test_lease.py::test_a_firewall_between_the_supervisors[reject",
    "tests/end_to_end/test_lease.py::test_a_head_that_does_not_leave",
    "tests/end_to_end/test_lease.py::test_a_link_that_is_cut_while_a_node_starts",
    "tests/end_to_end/test_lease.py::test_a_head_that_leaves_on_purpose",
    "tests/end_to_end/test_prune.py::test_a_node_that_is_down_is_named_and_cleaned_the_next_time",
    "tests/end_to_end/test_prune.py::test_what_is_followed_is_in_use",
    *(
        f"tests/end_to_end/test_python_api.py::test_{what}"
        for what in (
            *("large_ones_travel", "several_at_once", "typed_at_an_interpreter"),
            *("an_exception_leaves_no_job_behind", "what_comes_out_of_no_pickle"),
            "the_page_does_as_it_says",  # its parts are there, in test_fabric
        )
    ),
    "tests/head/connect/test_ssh_verdicts.py::test_the_verdict_is_that_of_ssh_in_rarer_cases",
    "tests/end_to_end/test_prune.py::test_cut_short_at_any_moment",
    "tests/end_to_end/test_restart.py::test_the_head_is_asked_to_stop",
    "tests/end_to_end/test_spares.py::test_the_masters_node_is_cut_off",
    "tests/engine/sharding/test_traffic.py::test_bytes_between_nodes",
    "tests/head/connect/test_ssh_config.py::test_the_shortcut_gives_what_ssh_gives",
    "tests/head/screen/test_screen.py::test_memory_is_bounded",
    *(
        f"tests/views/top/test_screen.py::test_the_ranks_of_a_job_and_what_their_keys_show[size{n}]"
        for n in (1, 2)
    ),
    "tests/views/report/test_browser.py::test_the_charts_are_drawn[light]",
    "tests/views/report/test_members.py::test_it_is_drawn[light]",
    "tests/engine/test_launched.py::test_the_configs_that_come_with_it_run",  # the demo runs one
    "tests/launchers/test_accelerate.py::test_the_files_for_each_node_serve_accelerate_itself",
    "tests/launchers/test_containers.py::test_kubernetes_runs",
    "tests/launchers/test_slurm.py::test_a_submitted_job_is_queued_again",
    *(
        f"tests/end_to_end/test_verdicts.py::test_the_cause_is_named[{planted}]"
        for planted in (
            *("wrapped", "CUDA out of memory", "bus error", "abort", "asked to end by somebody"),
            *("raise", "segmentation fault", "one rank never joins"),
            *("logged, then exit", "an assertion in a thread", "a syntax error", "no such file"),
            *("torch.save on a full disk", "too deep", "KeyboardInterrupt in code"),
            *("a child that fails", "an address that only the node itself has"),
            *("MemoryError", "no such module", "words at the end, as the engine's"),
            *("a full disk", "sys.exit(3)", "killed by somebody"),
            "its keeper slow, so that its end is heard of last",
            "slow to leave, so that the echo is heard first",
        )
    ),
    "tests/end_to_end/test_verdicts.py::test_clocks_that_disagree[-3600",
    "tests/end_to_end/test_verdicts.py::test_the_kernels_out_of_memory_killer",
    "tests/end_to_end/test_verdicts.py::test_the_same_failure_on_every_rank",
    # Keys whose options are in the features' own tests.
    *(
        f"tests/engine/core/test_fields.py::test_a_launch_that_{does}"
        for does in (
            *("is_started_again", "gives_its_ranks", "gives_up_a_node", "needs_its_head"),
            *("waits_for_a_node", "sends_its_code", "looks_at_its_nodes"),
        )
    ),
    "tests/engine/core/test_fields.py::test_a_launch_that_stands_still",
    "tests/engine/core/test_parity.py::test_every_layout_computes_what_a_plain_loop_does[less",
    "tests/engine/core/test_trainer.py::test_every_optimizer_of_torch",
    "tests/engine/core/test_trainer.py::test_a_signal_to_the_group_leaves_its_workers[spawn",
    "tests/engine/core/test_trainer.py::test_a_signal_to_the_group_leaves_its_workers[forkserver",
    "tests/engine/core/test_guards.py::test_one_rank_is_asked_and_all_save_and_end_together[2]",
    "tests/engine/core/test_used_parts.py::test_random_parts_in_random_micro_batches[6]",
    "tests/engine/data/test_loaders.py::test_loaders_that_people_write[nodes0]",
    "tests/engine/sharding/test_library_models.py",
    "tests/engine/saving/test_memory.py::test_it_goes_on_from_memory_to_the_bit[hybrid_shard",
    "tests/engine/saving/test_memory.py::test_killed_at_any_moment_at_most_a_step_is_lost",
    *(
        "tests/engine/saving/test_memory.py::test_other_ranks_put_the_state_together_from_memory"
        f"[{layout}"
        for layout in ("nodes join", "one copy is damaged", "both are damaged", "wider groups")
    ),
    "tests/engine/saving/test_resume.py::test_killed_at_any_moment_it_resumes_and_ends_the_same[20",
    *(
        f"tests/engine/saving/test_parts.py::test_a_node_dies_while_a_checkpoint_is_published[{at}"
        for at in ("0:", "1:1", "1:2", "1:4")
    ),
    "tests/engine/saving/test_parts.py::test_a_neighbour_without_room_for_a_copy",
    "tests/engine/saving/test_parts.py::test_what_is_nowhere_is_named_and_an_older_whole_one_is_taken",
    "tests/engine/sharding/test_models.py::test_models_train_as_in_a_plain_loop[nodes1]",
    "tests/head/commands/kept/test_prune.py::test_interrupted_anywhere_each_is_whole_or_gone[Ctrl-C]",
    "tests/end_to_end/test_warm.py::test_ranks_see_the_same",
    "tests/node/job/test_ends.py::test_random_proofs_are_true",
    "tests/node/job/test_programs.py::test_many_programs",
    "tests/node/warm/test_same_start.py::test_what_a_rank_sees_in_many_draws",
    "tests/node/job/test_supervisor.py::test_with_the_real_torchrun[fork-end]",
    *(
        "tests/node/warm/test_warm.py::test_a_stop_at_every_moment_after_the_offer"
        f"[orchestrator/node/warm/{moment}"
        for moment in (
            "standby.py-    agent_start",
            "standby.py-    process_title",
            "supervise.py-        super()",
        )
    ),
    "tests/scripts/test_gpu_checks.py::test_a_rehearsal",
    "tests/end_to_end/test_verify.py::test_a_slow_node_is_named_and_healthy_ones_are_not",
    "tests/scripts/test_examples.py::test_an_example_runs_on_two_nodes",  # of docs/coming-from
    "tests/scripts/test_pictures.py::test_they_are_of_a_real_run",
    "tests/launchers/test_coming_from.py::test_all_that_a_page_says_works",
]


FORKING = re.compile(r"^from tests\.engine(\.worlds import| import .*\bpair\b)", re.MULTILINE)
WHOLE_FILES = [entry for entry in (*SLOW, *LONG) if "::" not in entry]  # and whole folders


def examples(number: int) -> int:
    """How many examples of a property are tried, where the last gear tries `number`."""
    return max(number * hypothesis.settings().max_examples // EXAMPLES, 1)


def gear(item: pytest.Item) -> str:
    """`fast`, `long`, or nothing for the gear between."""
    used = set(getattr(item, "fixturenames", ()))
    if ONE_RUN_PER_KEY in used or item.nodeid.startswith(tuple(LONG)):
        return "long"
    if used & CLUSTERS or item.nodeid.startswith(tuple(SLOW)) or forks_ranks(item.path):
        return ""
    return "fast"


@functools.cache
def forks_ranks(path: Path) -> bool:
    """Does this module use one of those that fork ranks with torch imported?"""
    return FORKING.search(path.read_text(encoding="utf-8")) is not None


def none_in_first_gear(name: str, path: Path) -> bool:
    """Is this a module, or a folder, that need not be imported for the first gear?"""
    return name.startswith(tuple(WHOLE_FILES)) or (path.suffix == ".py" and forks_ranks(path))


def dealt(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """The order for xdist's workers, each of which begins with an equal part of the list.

    Every part ends with tests of the first gear: at the end of the run no worker has a long test
    left that another, which is out of work, cannot take from it. The tests of a module, which may
    share a cluster, stay together.
    """
    fast = [item for item in items if item.get_closest_marker("fast")]
    others = [item for item in items if not item.get_closest_marker("fast")]
    order = []
    for worker in range(workers):
        for kind in (others, fast):
            order += kind[len(kind) * worker // workers : len(kind) * (worker + 1) // workers]
    return order or items

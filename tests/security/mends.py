"""Every attack that worked once, planted back: the test that keeps it out must fail. `make mends`.

    python tests/security/mends.py [S9 M3 …]

A plant takes one mend away, by edits of the sources in a copy of the tree, and names the tests that
have to fail then. They pass on the tree as it is, as part of the suite. SECURITY.md has the same
numbers; `tests/security/test_page.py` compares the two. A plant whose text is no longer found is an
error, so that a mend that moves takes its plant along.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT = 300  # seconds for the tests of one plant; a mend may be what ends a wait


@dataclass(frozen=True)
class Plant:
    """One mend that is taken away."""

    finding: str
    file: str  # below aiograd/
    mend: str
    without: str
    tests: tuple[str, ...]  # file below tests/, and a name
    more: tuple[tuple[str, str, str], ...] = ()  # where several mends keep the same thing out

    @property
    def edits(self) -> tuple[tuple[str, str, str], ...]:
        """File, text and replacement of everything that is changed."""
        return ((self.file, self.mend, self.without), *self.more)


PLANTS = [
    Plant(
        "S1",
        "rpc/link/handshaking.py",
        "elif needs_seal(transport):",
        "elif False:",
        (
            "security/test_frames.py::test_code_that_a_relay_injects_runs_nowhere",
            "security/test_frames.py::test_a_relay_changes_no_bit_of_an_argument_or_a_result",
        ),
    ),
    Plant(
        "S2",
        "cluster/joining/rendezvous.py",
        "if (why := exposed_permissions(found.st_mode, found.st_uid, user)) is not None:",
        "if why := None:",
        (
            "cluster/joining/test_rendezvous.py::test_a_sign_that_another_user_planted_is_refused",
            "cluster/joining/test_rendezvous.py"
            "::test_a_secret_file_that_another_user_planted_is_refused",
            "security/test_local_user.py::test_a_planted_rendezvous_file_is_not_believed",
        ),
    ),
    Plant(
        "S3",
        "rpc/transport/tls.py",
        "        if name not in names:\n",
        "        if name.lower() not in map(str.lower, names):\n",
        ("rpc/transport/test_tls.py::test_a_certificate_does_not_cover_its_name_in_other_letters",),
    ),
    Plant(
        "S4",
        "wire/handshake.py",
        "return len(incarnation) == 16 and incarnation[:_STAMP] == _stamp(name, "
        "incarnation[_STAMP:])",
        "return len(incarnation) == 16",
        ("security/test_identity.py::test_nobody_comes_with_the_incarnation_of_another_worker",),
    ),
    Plant(
        "S4",
        "rref/refcount/access.py",
        """        if ref_id[1] != stamp_of(partner.incarnation):
            raise self._refusal(partner)

    def may_release""",
        """
    def may_release""",
        (
            "security/test_identity.py"
            "::test_values_of_others_are_neither_fetched_nor_claimed_nor_created_ahead",
        ),
    ),
    Plant(
        "S4",
        "rref/refcount/access.py",
        "if holder is not None or not again:",
        "if holder is not None:",
        (
            "security/test_identity.py"
            "::test_references_are_not_released_before_their_creator_made_them",
        ),
    ),
    Plant(
        "S8",
        "rpc/link/links.py",
        "if len(links) < agent.options.partner_links:",
        "if True:",
        (
            "security/test_partner_limits.py"
            "::test_one_name_has_few_links_however_many_incarnations_it_makes",
        ),
    ),
    Plant(
        "S8",
        "rpc/link/links.py",
        "if not agent.accounts.of(name).may_begin():",
        "if False:",
        (
            "security/test_partner_limits.py"
            "::test_a_partner_that_comes_and_goes_begins_few_sessions",
        ),
    ),
    Plant(
        "S9",
        "rpc/callee/dispatch.py",
        "return running >= 2 * self._most",
        "return running >= 64 * self._most",
        ("security/test_rogues.py::test_calls_that_claim_to_be_nested_are_bounded_too",),
    ),
    Plant(
        "S9",
        "rpc/callee/dispatch.py",
        "executions: list[Calls] = [self.execution] if share is None else list(share.calls)",
        "executions: list[Calls] = [self.execution]",
        ("security/test_partner_limits.py::test_calls_of_all_links_of_a_name_count_together",),
    ),
    Plant(
        "S9",
        "rpc/callee/dispatch.py",
        "self._charge(invocation, size)",
        "pass",
        (
            "security/test_partner_limits.py"
            "::test_arguments_of_calls_that_run_count_for_their_partner",
            "security/test_partner_limits.py"
            "::test_arguments_beyond_the_share_of_a_partner_are_refused",
        ),
    ),
    Plant(
        "S10",
        "cluster/membership/collectives.py",
        'hold.take("gathers")',
        "pass",
        ("security/test_identity.py::test_a_partner_waits_in_a_bounded_number_of_gathers",),
    ),
    Plant(
        "S11",
        "rref/services.py",
        "if not self._values.take(partner.name, more):",
        "if False:",
        (
            "security/test_partner_limits.py"
            "::test_values_of_one_partner_do_not_use_up_those_of_another",
        ),
    ),
    Plant(
        "S11",
        "rref/registry.py",
        "hold.take(MEMORY, size)",
        "pass",
        (
            "security/test_partner_limits.py"
            "::test_arguments_stay_counted_while_they_live_on_in_a_value",
        ),
    ),
    Plant(
        "S12",
        "dist/travellers.py",
        "dtype = _FLOATING.get(name) if type(name) is str else None",
        "dtype = np.dtype(name)",
        ("security/test_identity.py::test_a_tensor_does_not_grow_by_its_dtype",),
    ),
    Plant(
        "S12",
        "dist/travellers.py",
        "arrival.scratch.get(GROWN, 0) + max(found.nbytes - array.nbytes, 0)",
        "0",
        ("security/test_identity.py::test_a_tensor_that_a_hook_narrowed_counts_as_it_is_here",),
    ),
    Plant(
        "S13",
        "wire/safecodec.py",
        "self.memory += sys.getsizeof(text)",
        "self.memory += len(text)",
        (
            "security/test_partner_limits.py"
            "::test_arguments_of_calls_that_run_count_for_their_partner",
        ),
    ),
    Plant(
        "S14",
        "rpc/link/ledger.py",
        """        if self.used + size > self._most:
            self._limits.reached(MEMORY)
            return False
""",
        "",
        (
            "security/test_partner_limits.py"
            "::test_a_partner_that_announces_and_sends_nothing_occupies_only_its_share",
        ),
    ),
    Plant(
        "S14",
        "rpc/link/transfer_watch.py",
        "return sorted(late)",
        "return []",
        (
            "security/test_partner_limits.py"
            "::test_a_large_message_that_comes_too_slowly_is_refused_and_the_link_goes_on",
        ),
    ),
    Plant(
        "S15",
        "rpc/callee/dispatch.py",
        "abandoned = sum(each.abandoned for each in executions)",
        "abandoned = 0",
        (
            "security/test_partner_limits.py"
            "::test_calls_that_a_partner_abandoned_count_while_they_run",
        ),
    ),
    Plant(
        "S16",
        "rpc/link/inbox.py",
        "return lane in self._calls",
        "return any(each.kind in NUMBERED and each.lane == lane for each in self.entries)",
        (
            "security/test_partner_limits.py"
            "::test_small_messages_behind_a_large_one_take_constant_time_each",
        ),
    ),
    Plant(
        "S17",
        "rpc/link/links.py",
        """            if answer[0] != ACCEPTED:
                del self.table[peer.incarnation]
            return answer
""",
        "            return answer\n",
        ("security/test_partner_limits.py::test_handshakes_that_begin_no_session_leave_no_link",),
    ),
    Plant(
        "S18",
        "cluster/membership/forms.py",
        "        and 0 <= peer.rank < RANKS\n",
        "",
        ("security/test_identity.py::test_a_malformed_member_does_not_join_and_others_still_can",),
        (
            (
                "cluster/membership/coordinator.py",
                "if peer.identity != sender.identity:",
                "if peer.name != sender.name:",
            ),
            ("cluster/membership/roster.py", "if not 0 <= peer.rank < RANKS:", "if False:"),
        ),
    ),
    Plant(
        "S18",
        "cluster/membership/roster.py",
        "        if not taken:\n            return rank\n",
        "",
        ("security/test_identity.py::test_one_name_uses_one_rank_however_often_it_asks",),
    ),
    Plant(
        "S18",
        "cluster/membership/roster.py",
        "            if partner:\n                self._choose(peer)\n            else:\n    ",
        "            if True:\n    ",
        (
            "security/test_identity.py"
            "::test_a_partner_that_joins_with_the_last_rank_leaves_the_others",
        ),
    ),
    Plant(
        "S18",
        "cluster/membership/coordinator.py",
        "elif named or self._agent.restricts(sender):",
        "elif named:",
        (
            "security/test_identity.py"
            "::test_a_partner_that_wants_new_names_gets_the_rank_of_its_own",
        ),
    ),
    Plant(
        "S19",
        "cluster/membership/collectives.py",
        "if not _is_group(group):",
        "if False:",
        (
            "security/test_identity.py"
            "::test_a_malformed_group_of_a_gather_is_refused_and_losses_are_announced",
        ),
    ),
    Plant(
        "S19",
        "cluster/membership/coordinator.py",
        """            except Exception:
                _log.exception("%s: a change of the membership failed here", self._agent.name)
""",
        "            except ZeroDivisionError:\n                pass\n",
        (
            "security/test_identity.py"
            "::test_a_failure_of_the_coordinator_does_not_stop_its_announcements",
        ),
    ),
    Plant(
        "S20",
        "rpc/affinity.py",
        "os.dup2(empty, each, inheritable=False)",
        "pass",
        (
            "failures/test_killed_and_stopped_workers.py"
            "::test_f1_a_killed_worker_is_lost_although_a_child_that_it_forked_lives",
        ),
    ),
    Plant(
        "S20",
        "cluster/membership/coordinator.py",
        "            self._agent.spawn(self._lose_ended(peer, why, cause))\n",
        "            pass\n",
        (
            "failures/test_killed_and_stopped_workers.py"
            "::test_f1_a_killed_worker_is_lost_although_a_child_that_it_forked_lives",
        ),
    ),
    Plant(
        "S21",
        "rpc/link/listener.py",
        "if self._closed or oldest is None or now - self._pending[oldest][1] < _MAKES_ROOM:",
        "if True:",
        ("security/test_strangers.py::test_strangers_that_hold_all_places_make_room_for_a_member",),
    ),
    Plant(
        "M1",
        "dist/travellers.py",
        "        if arrival.restricted:\n            cls = None\n",
        "",
        ("security/test_identity.py::test_a_tensor_of_a_partner_is_a_plain_one",),
    ),
    Plant(
        "M1",
        "rpc/callee/exposure.py",
        'elif isinstance(found, types.FunctionType) and "." in path:',
        "elif False:",
        ("security/test_identity.py::test_an_exposed_method_is_not_found_by_its_name_alone",),
    ),
    Plant(
        "M2",
        "dist/__init__.py",
        "        if channel.restricts(sender):\n            # Operations",
        "        if False:\n            # Operations",
        ("security/test_identity.py::test_a_partner_learns_nothing_of_the_graph_behind_its_edges",),
    ),
    Plant(
        "M3",
        "rpc/link/link.py",
        "return self.account is None or self.account.log_rate.allows()",
        "return True",
        (
            "security/test_partner_limits.py"
            "::test_log_lines_of_a_partner_are_few_over_all_its_links_and_escaped",
        ),
    ),
    Plant(
        "M3",
        "rpc/callee/responses.py",
        '"%s: refused %.80r of %s (%s): %.200r"',
        '"%s: refused %.80s of %s (%s): %.200s"',
        (
            "security/test_partner_limits.py"
            "::test_log_lines_of_a_partner_are_few_over_all_its_links_and_escaped",
        ),
    ),
    Plant(
        "M3",
        "rpc/agent.py",
        "if link is None or link.may_log():",
        "if True:",
        (
            "security/test_partner_limits.py"
            "::test_posts_that_a_partner_says_it_refused_leave_few_lines",
        ),
    ),
    Plant(
        "M3",
        "cluster/membership/coordinator.py",
        "if peer.incarnation != self._agent.incarnation and self._may_log(peer):",
        "if peer.incarnation != self._agent.incarnation:",
        ("security/test_identity.py::test_refused_joins_of_a_partner_leave_few_lines",),
    ),
    Plant(
        "M3",
        "rpc/link/listener.py",
        "if level == logging.WARNING or self._rate.allows():",
        "if True:",
        ("security/test_strangers.py::test_refusals_are_logged_at_a_bounded_rate",),
    ),
    Plant(
        "M4",
        "dist/access.py",
        '                hold.check("aborts")\n',
        "                pass\n",
        (
            "dist/test_access.py"
            "::test_marks_of_aborted_passes_are_limited_and_only_of_passes_of_the_sender",
        ),
    ),
    Plant(
        "M4",
        "rref/refcount/owner.py",
        """        forks = self._abandoned.setdefault(fork[1], {})
        while""",
        """        while sum(map(len, self._abandoned.values())) >= ABANDONED_LIMIT:
            first = next(iter(self._abandoned))
            self._forget_abandoned(next(iter(self._abandoned[first])))
        forks = self._abandoned.setdefault(fork[1], {})
        while""",
        (
            "rref/refcount/test_protocol.py"
            "::test_a_creator_that_abandons_many_pushes_out_its_own_only",
        ),
    ),
    Plant(
        "M4",
        "rref/refcount/owner.py",
        """        while len(forks) >= ABANDONED_LIMIT:
            del forks[next(iter(forks))]
""",
        "",
        ("rref/refcount/test_protocol.py::test_given_up_creations_that_never_come_do_not_pile_up",),
    ),
    Plant(
        "M4",
        "rref/services.py",
        "if number - low >= _PARTNERS_REQUESTS:",
        "if False:",
        (
            "security/test_partner_limits.py"
            "::test_numbers_of_fork_requests_under_way_are_few_and_small",
        ),
    ),
    Plant(
        "M4",
        "dist/released.py",
        "        ids[context_id] = None\n        while len(ids) > IDS:\n",
        "        ids[context_id] = None\n        while False:\n",
        ("dist/test_released.py::test_one_partner_pushes_out_ids_of_its_own_only",),
    ),
    Plant(
        "M4",
        "dist/access.py",
        "            hold.take(MEMORY, size)\n            try:\n",
        "            try:\n",
        ("dist/test_access.py::test_messages_of_passes_that_never_begin_count_for_their_sender",),
    ),
    Plant(
        "M5",
        "cluster/membership/forms.py",
        "        and is_name(peer.name)\n",
        "",
        ("security/test_identity.py::test_a_malformed_change_of_the_roster_changes_nothing",),
    ),
    Plant(
        "M5",
        "wire/handshake.py",
        "if length > len(name) or not is_name(text):",
        "if length > len(name):",
        (
            "wire/test_handshake.py::test_a_name_that_no_worker_can_have_is_refused_before_anything_is_proven",
        ),
    ),
    Plant(
        "M6",
        "cluster/joining/rendezvous.py",
        "    for parent in parents:\n",
        "    for parent in parents[:1]:\n",
        (
            "cluster/joining/test_rendezvous.py"
            "::test_a_folder_that_another_user_made_first_does_not_keep_us_from_starting",
            "security/test_local_user.py"
            "::test_squatting_on_our_folder_does_not_keep_us_from_starting",
        ),
    ),
    Plant(
        "M7",
        "rpc/options.py",
        """        raise ValueError(
            "modes by name need TLS(mutual=True), or a secret for each of the names: "
            "only that or a certificate proves a name"
        )
""",
        "",
        (
            "security/test_modes_by_name.py::test_one_secret_from_the_environment_proves_no_names",
            "security/test_modes_by_name.py::test_modes_by_name_are_checked",
        ),
    ),
]


def copy_tree(folder: Path) -> None:
    """Copy what tests need."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("aiograd", "tests", "docs", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored, symlinks=True)
    for name in ("pyproject.toml", "aiograd_pytest.py", "SECURITY.md"):
        shutil.copy(ROOT / name, folder / name)


def run(plant: Plant, folder: Path) -> list[str]:
    """Plant a bug, run its tests, and take it out again; the tests that did not fail."""
    kept = []
    for file, mend, without in plant.edits:
        path = folder / "aiograd" / file
        text = path.read_text()
        if text.count(mend) != 1:
            raise SystemExit(f"{plant.finding}: {file} has {text.count(mend)} times\n{mend}")
        path.write_text(text.replace(mend, without))
    try:
        for test in plant.tests:
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
            environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
            try:
                ended = subprocess.run(
                    [*command, f"tests/{test}"],
                    cwd=folder,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                sys.stdout.write(f"{plant.finding:4s} fails: {test} (it does not end)\n")
                continue
            failed = ended.returncode == 1 and "FAILED" in ended.stdout
            # Behind the errors of fixtures, which a test that fails may leave things to.
            failures = ended.stdout.rpartition("= FAILURES =")[2].splitlines()
            lines = [line for line in failures if line.startswith("E   ")]
            # Not because of a slip of the plant itself.
            slip = any("NameError" in line or "SyntaxError" in line for line in lines)
            shown = lines[0][1:].strip()[:110] if lines else ended.stdout[-300:]
            word = "fails" if failed else "PASSES"
            sys.stdout.write(f"{plant.finding:4s} {word}: {test}\n     {shown}\n")
            sys.stdout.flush()
            if not failed or slip:
                kept.append(test)
    finally:
        for file, *_ in plant.edits:
            shutil.copy(ROOT / "aiograd" / file, folder / "aiograd" / file)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("findings", nargs="*")
    wanted = parser.parse_args().findings
    passed = []
    with tempfile.TemporaryDirectory(prefix="aiograd-mends-") as folder:
        copy_tree(Path(folder))
        for plant in PLANTS:
            if not wanted or plant.finding in wanted:
                passed += run(plant, Path(folder))
    if passed:
        raise SystemExit(f"these tests cannot fail: {', '.join(passed)}")


if __name__ == "__main__":
    main()

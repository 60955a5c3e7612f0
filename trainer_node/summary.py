"""`summary.json`: what a run did, as measured."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from sync.schema.calls import SyncStatus

from .evaluate import Score
from .sparsity import DeltaSize

if TYPE_CHECKING:
    from .run import _Run

Summary = dict[str, Any]


def summarize(
    run: _Run, before: Score | None, after: Score | None, status: SyncStatus, sparse: DeltaSize | None, seconds: float
) -> Summary:
    """Collect the figures; every one is counted or timed in this run."""
    history = run.publisher.history
    deltas = [p for p in history if p.kind == "delta"]
    elements = history[0].elements
    publish = sum(p.diff_seconds for p in history[1:])
    return {
        "environment": run.config.environment,
        "steps": run.trainer.state.global_step,
        "seed": run.config.seed,
        "success_before": before.success if before else None,
        "success_after": after.success if after else None,
        "reward_before": before.reward if before else None,
        "reward_after": after.reward if after else None,
        "evaluation_episodes": after.episodes if after else 0,
        "evaluation_unscored": (before.unscored if before else 0) + (after.unscored if after else 0),
        "versions": len(history),
        "last_version": str(history[-1].identity),
        "curriculum_versions": run.curriculum_versions,
        "digest_checks": status.digest_checks,
        "digest_failures": status.digest_failures,
        "follower_version": status.version,
        "full_copy_bytes": history[0].full,
        "delta_bytes_mean": statistics.fmean(p.payload for p in deltas) if deltas else 0.0,
        "delta_changed_share": statistics.fmean(p.changed for p in deltas) / elements if deltas else 0.0,
        "delta_learning_rate": run.config.learning_rate,
        "sparse_delta_bytes_mean": sparse.payload if sparse else None,
        "sparse_delta_changed_share": sparse.changed if sparse else None,
        "sparse_delta_one_ulp_share": sparse.one_ulp if sparse else None,
        "sparse_delta_learning_rate": sparse.learning_rate if sparse else None,
        "sparse_delta_steps": sparse.steps if sparse else 0,
        "syncs_skipped": run.transfer.skipped,
        "pokes_failed": run.pokes_failed,
        "rollouts": run.inbox.counts.rollouts,
        "groups": dict(run.inbox.counts.groups),
        "train_seconds": seconds,
        "steps_per_second": run.trainer.state.global_step / seconds,
        "publish_diff_share": publish / seconds,
        "total_seconds": time.monotonic() - run.started,
    }

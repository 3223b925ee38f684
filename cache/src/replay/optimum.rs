//! The offline optimum: the fewest misses that any choice of victims could have had.
//!
//! A group that fits at once is one request that all its members answer together: whoever is needed again last goes,
//! and members never do. That is MIN for sets, and the exchange argument is the usual one: keep x instead of y, where
//! x is needed first, and no later cost is higher. Of a group that runs in waves nothing has to stay, so the nearest
//! needed of all that were there or came are kept; every order of waves ends in such a set, so no policy does better.

use horizon_core::ids::ExpertId;

use super::{Counts, Workload};
use crate::Geometry;

/// What the optimum knows of a layer.
struct Layer {
    /// Resident experts; as many as the capacity from the start.
    resident: Vec<ExpertId>,
    /// By expert: the next step that asks for it, `u32::MAX` for none.
    next: Vec<u32>,
}

pub(super) fn replay(workload: &Workload, geometry: &Geometry, counts: &mut Counts) {
    let limit = geometry.capacity.min(geometry.spares);
    let mut layers: Vec<Layer> = first_uses(workload)
        .into_iter()
        .map(|next| Layer {
            resident: (0u32..).map(ExpertId).take(geometry.capacity).collect(),
            next,
        })
        .collect();
    for group in workload.groups() {
        let Layer { resident, next } = &mut layers[group.layer];
        for (e, n) in group.experts.iter().zip(group.next) {
            next[e.index()] = *n;
        }
        let member = |e: &ExpertId| group.experts.binary_search(e).is_ok();
        let before = resident.len();
        let hits = resident.iter().filter(|e| member(e)).count();
        let misses = group.experts.len() - hits;
        counts.add(&group, misses);
        if misses == 0 {
            continue;
        }
        let fits = group.experts.len() <= limit;
        resident.retain(|e| !member(e));
        resident.extend(group.experts);
        // Members of a group that fits stay, whatever their next use.
        let key = |e: &ExpertId| (!(fits && member(e)), next[e.index()], *e);
        resident.select_nth_unstable_by_key(before - 1, key);
        resident.truncate(before);
    }
}

/// By layer and expert: the first step that asks for it.
fn first_uses(workload: &Workload) -> Vec<Vec<u32>> {
    let geometry = workload.geometry();
    let mut first = vec![vec![u32::MAX; geometry.experts]; geometry.layers.len()];
    for group in workload.groups() {
        for e in group.experts {
            let first = &mut first[group.layer][e.index()];
            *first = (*first).min(u32::try_from(group.step).expect("steps are counted in 32 bits"));
        }
    }
    first
}

//! A policy on a trace: the cache's decisions without its slots.

use horizon_core::ids::ExpertId;

use crate::Geometry;
use crate::access::Access;
use crate::policy::Policy;

/// Which experts [`ResidentV1`](crate::ResidentV1) would have resident, serving one sequence without a failure.
#[derive(Clone, Debug)]
pub struct PolicyReplay {
    geometry: Geometry,
    policy: Policy,
    layers: Vec<Layer>,
    /// Scratch: keys of those that may go.
    keys: Vec<((u64, u64, u32), ExpertId)>,
    /// Scratch: hits and missing of a group in waves.
    waves: (Vec<ExpertId>, Vec<ExpertId>),
}

#[derive(Clone, Debug)]
struct Layer {
    /// By expert.
    resident: Vec<bool>,
    access: Vec<Access>,
    /// Acquisitions so far.
    clock: u64,
}

impl PolicyReplay {
    /// The canonical initial placement.
    #[must_use]
    pub fn new(geometry: Geometry, policy: Policy) -> Self {
        let layer = Layer {
            resident: (0..geometry.experts).map(|e| e < geometry.capacity).collect(),
            access: vec![Access::default(); geometry.experts],
            clock: 0,
        };
        Self {
            layers: vec![layer; geometry.layers.len()],
            geometry,
            policy,
            keys: Vec::new(),
            waves: (Vec::new(), Vec::new()),
        }
    }

    /// Asks for a group of the layer at position `layer`, in waves if it must be, and gives the number of misses.
    ///
    /// # Panics
    /// When the model has no such layer or expert.
    pub fn acquire(&mut self, layer: usize, group: &[ExpertId]) -> usize {
        let limit = self.geometry.capacity.min(self.geometry.spares);
        if group.len() <= limit {
            return self.wave(layer, group);
        }
        let resident = &self.layers[layer].resident;
        let (mut hits, mut missing) = std::mem::take(&mut self.waves);
        hits.clear();
        missing.clear();
        for e in group {
            if resident[e.index()] {
                hits.push(*e);
            } else {
                missing.push(*e);
            }
        }
        if !hits.is_empty() {
            self.wave(layer, &hits);
        }
        for wave in missing.chunks(limit) {
            self.wave(layer, wave);
        }
        let misses = missing.len();
        self.waves = (hits, missing);
        misses
    }

    /// Whether an expert is resident in the layer at position `layer`.
    ///
    /// # Panics
    /// When the model has no such layer or expert.
    #[must_use]
    pub fn is_resident(&self, layer: usize, expert: ExpertId) -> bool {
        self.layers[layer].resident[expert.index()]
    }

    fn wave(&mut self, layer: usize, group: &[ExpertId]) -> usize {
        let Layer {
            resident,
            access,
            clock,
        } = &mut self.layers[layer];
        let missing = group.iter().filter(|e| !resident[e.index()]).count();
        if missing > 0 {
            // As many go as come: every slot of the layer is taken from the start.
            let mut members = group.iter().peekable();
            self.keys.clear();
            for (id, (here, access)) in (0u32..).zip(resident.iter().zip(access.iter())) {
                let e = ExpertId(id);
                if members.next_if_eq(&&e).is_none() && *here {
                    self.keys
                        .push((self.policy.key(e, *access, *clock, self.geometry.pinned()), e));
                }
            }
            if missing < self.keys.len() {
                self.keys.select_nth_unstable(missing - 1);
            }
            for (_, victim) in &self.keys[..missing] {
                resident[victim.index()] = false;
            }
            for e in group {
                resident[e.index()] = true;
            }
        }
        *clock += 1;
        for e in group {
            access[e.index()].touch(*clock);
        }
        missing
    }
}

//! A trace as the cache meets it: one group of distinct experts for each step and layer.

use horizon_core::ids::ExpertId;

use crate::Geometry;
use crate::trace::Trace;

/// The groups of a trace, in the order in which they are asked for.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Layers, experts and k; capacity and spares are those of full residency.
    geometry: Geometry,
    record_bytes: u64,
    /// Experts of all groups, one group after another.
    experts: Vec<ExpertId>,
    /// Beside each of them, the next group of its layer that asks for it, counted by step; `u32::MAX` for none.
    next: Vec<u32>,
    /// Where the groups end in both; step by step, layer by layer.
    ends: Vec<usize>,
    /// Rows of each step.
    rows: Vec<usize>,
}

/// A group that a step asks for.
#[derive(Clone, Copy, Debug)]
pub struct Group<'a> {
    /// Step, from 0.
    pub step: usize,
    /// Rows of the step.
    pub rows: usize,
    /// Position of the layer among those with routed experts.
    pub layer: usize,
    /// Distinct experts, ascending.
    pub experts: &'a [ExpertId],
    /// For each of them, the next step whose group of this layer has it; `u32::MAX` for none.
    pub next: &'a [u32],
}

impl Workload {
    /// The groups of `trace`.
    #[must_use]
    pub fn new(trace: &Trace) -> Self {
        let header = trace.header();
        let (layers, k) = (header.layers.len(), header.top_k);
        let (mut experts, mut ends, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        let mut chosen = vec![false; header.experts];
        for step in trace.rows() {
            for layer in 0..layers {
                for row in step.chunks_exact(layers * k) {
                    for e in &row[layer * k..(layer + 1) * k] {
                        chosen[usize::from(*e)] = true;
                    }
                }
                for (id, chosen) in (0u32..).zip(&mut chosen) {
                    if std::mem::take(chosen) {
                        experts.push(ExpertId(id));
                    }
                }
                ends.push(experts.len());
            }
            rows.push(step.len() / (layers * k));
        }
        let mut workload = Self {
            geometry: Geometry {
                layers: header.layers.clone(),
                experts: header.experts,
                top_k: k,
                capacity: header.experts,
                spares: header.experts,
            },
            record_bytes: header.record_bytes,
            next: vec![u32::MAX; experts.len()],
            experts,
            ends,
            rows,
        };
        workload.look_ahead();
        workload
    }

    fn look_ahead(&mut self) {
        let (layers, experts) = (self.geometry.layers.len(), self.geometry.experts);
        let mut next_use = vec![u32::MAX; layers * experts];
        for group in (0..self.ends.len()).rev() {
            let start = group.checked_sub(1).map_or(0, |before| self.ends[before]);
            let (step, layer) = (group / layers, group % layers);
            for i in start..self.ends[group] {
                let expert = &mut next_use[layer * experts + self.experts[i].index()];
                self.next[i] = *expert;
                *expert = u32::try_from(step).expect("steps are counted in 32 bits");
            }
        }
    }

    /// Layers, experts and k, with the capacity and the spares of full residency.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Bytes of one expert's record.
    #[must_use]
    pub fn record_bytes(&self) -> u64 {
        self.record_bytes
    }

    /// Experts asked for, all groups together.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.experts.len()
    }

    /// All groups, in order.
    pub fn groups(&self) -> impl Iterator<Item = Group<'_>> {
        let layers = self.geometry.layers.len();
        let mut start = 0;
        self.ends.iter().enumerate().map(move |(i, end)| {
            let range = std::mem::replace(&mut start, *end)..*end;
            Group {
                step: i / layers,
                rows: self.rows[i / layers],
                layer: i % layers,
                experts: &self.experts[range.clone()],
                next: &self.next[range],
            }
        })
    }
}

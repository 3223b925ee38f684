//! The feed-forward block of the fast backend: router, routed experts grouped over the step's rows, shared
//! expert, dense MLP.

use rayon::prelude::*;

use super::rows::{each_row, narrow_row, norm_rows};
use super::tasks::{Tasks, transpose};
use super::workspace::Workspace;
use super::{Context, ExpertForm};
use crate::backend::{StepError, StepReport};
use crate::cpu::numerics::{Routing, route, sigmoid, silu};
use crate::cpu::simd::kernels::{AddScaled, arrange_integers, integer_len, padded, permute, permuted_len};
use crate::cpu::step::{ExpertRows, for_each_wave, group_by_expert, routing_taps};
use crate::cpu::tiling::TiledLayout;
use crate::ids::LayerId;
use crate::provider::{ExpertProvider, Hold, RecordGuard};
use crate::roles::{ExpertMatrix, LayerRole};
use crate::spec::{FeedForward, MoeSpec};
use crate::stage::{Stage, Tap, TapData};

/// One layer of a step.
pub struct Step<'a> {
    pub c: &'a Context,
    pub layer: LayerId,
    pub rows: usize,
}

/// Where the result of one (row, rank) lies: column `column` of `uses` in a block that starts at use `start`.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    start: usize,
    uses: usize,
    column: usize,
}

const SHARED: [LayerRole; 3] = [LayerRole::SharedGate, LayerRole::SharedUp, LayerRole::SharedDown];
const DENSE: [LayerRole; 3] = [LayerRole::DenseGate, LayerRole::DenseUp, LayerRole::DenseDown];

impl Step<'_> {
    /// Norm and block for all rows; the result, before the residual add, is `ws.block`.
    pub fn feed_forward(
        &self,
        block: &FeedForward,
        ws: &mut Workspace,
        experts: &dyn ExpertProvider,
        hold: &mut Hold,
        taps: Option<&mut Vec<Tap>>,
        report: &mut StepReport,
    ) -> Result<(), StepError> {
        let (c, hidden, n) = (self.c, self.c.spec.hidden, self.rows);
        let norm = c.weights.layer(self.layer, LayerRole::FeedForwardNorm);
        let stride = padded(hidden);
        norm_rows(
            c,
            &ws.hidden[..n * hidden],
            norm,
            &mut ws.normed[..n * stride],
            false,
        );
        each_row(
            &ws.normed[..n * stride],
            stride,
            &mut ws.inputs[..n * stride],
            stride,
            |x, out| {
                out.copy_from_slice(x);
                if c.narrows() {
                    narrow_row(&mut out[..hidden]);
                }
            },
        );
        match block {
            FeedForward::Dense { width } => {
                self.products(ws, &Routed::default(), Some((DENSE, *width)));
                transpose(&ws.down[..n * hidden], n, &mut ws.block, hidden);
            }
            FeedForward::Moe(moe) => {
                let (routing, gates) = self.route(moe, ws, taps);
                let groups = group_by_expert(moe.experts, &routing);
                report.routed += (n * moe.top_k) as u64;
                report.records += groups.len() as u64;
                let mut mlp = moe.shared.as_ref().map(|s| (SHARED, s.width));
                let mut done: Vec<ExpertRows> = Vec::with_capacity(groups.len());
                for_each_wave(experts, hold, self.layer, &groups, |wave, addresses| {
                    let routed = Routed {
                        records: addresses.iter().map(|a| c.slots.record(*a)).collect(),
                        groups: wave,
                        width: moe.width,
                        before: done.iter().map(|g| g.uses.len()).sum(),
                    };
                    self.products(ws, &routed, mlp.take());
                    done.extend(routed.groups);
                })?;
                self.combine(ws, &done, &routing, &gates, moe.shared.is_some());
            }
        }
        Ok(())
    }

    /// Routing of every row, and the shared expert's gate of every row (empty if it has none).
    fn route(
        &self,
        moe: &MoeSpec,
        ws: &mut Workspace,
        taps: Option<&mut Vec<Tap>>,
    ) -> (Vec<Routing>, Vec<f32>) {
        let (c, n, hidden) = (self.c, self.rows, self.c.spec.hidden);
        let inputs = &ws.normed[..n * padded(hidden)];
        let (raw, rest) = ws.raw.split_at_mut(n * moe.experts);
        let gated = moe.shared.as_ref().is_some_and(|s| s.gated);
        let gates = &mut rest[..if gated { n } else { 0 }];
        let mut tasks = Tasks::default();
        tasks.dense(c.weights.matrix(self.layer, LayerRole::Router), inputs, raw);
        if gated {
            let gate = c.weights.matrix(self.layer, LayerRole::SharedExpertGate);
            tasks.dense(gate, inputs, gates);
        }
        tasks.run(c.isa);
        let mut logits = vec![0.0; n * moe.experts];
        transpose(raw, n, &mut logits, moe.experts);
        let rows = logits.par_chunks_exact(moe.experts).with_min_len(8);
        let routing: Vec<Routing> = rows.map(|l| route(l, moe.top_k, moe.renormalize)).collect();
        if let Some(taps) = taps {
            let stage = Stage::RouterLogits(self.layer);
            taps.push(Tap {
                stage,
                width: moe.experts,
                data: TapData::F32(logits),
            });
            taps.extend(routing_taps(self.layer, moe.top_k, &routing));
        }
        (routing, gates.iter().map(|g| sigmoid(*g)).collect())
    }

    /// Gate, up and down of the routed experts and of the MLP that every row passes, into `ws.down`.
    fn products(&self, ws: &mut Workspace, routed: &Routed<'_>, mlp: Option<([LayerRole; 3], usize)>) {
        let (c, n, hidden) = (self.c, self.rows, self.c.spec.hidden);
        let uses = routed.uses();
        let (x_stride, act_stride) = (self.expert_stride(hidden), self.expert_stride(routed.width));
        self.arrange_inputs(ws, routed, x_stride);
        let x = if n == 1 {
            &ws.expert_rows
        } else {
            &ws.expert_inputs
        };

        let mut tasks = Tasks::default();
        for (matrix, role, out) in [
            (ExpertMatrix::Gate, 0, &mut ws.gate),
            (ExpertMatrix::Up, 1, &mut ws.up),
        ] {
            let (experts, rest) = out.split_at_mut(uses * routed.width);
            let mut place = Slices {
                x,
                x_stride,
                out: experts,
            };
            self.expert_tasks(&mut tasks, routed, matrix, (routed.width, hidden), &mut place);
            if let Some((roles, width)) = mlp {
                let w = c.weights.matrix(self.layer, roles[role]);
                tasks.dense(w, &ws.inputs[..n * padded(hidden)], &mut rest[..n * width]);
            }
        }
        tasks.run(c.isa);
        self.activate(ws, routed, act_stride, mlp.map(|(_, width)| width));

        let mut tasks = Tasks::default();
        let (shared, experts) = ws.down.split_at_mut(n * hidden);
        let mut place = Slices {
            x: &ws.expert_acts,
            x_stride: act_stride,
            out: &mut experts[routed.before * hidden..],
        };
        self.expert_tasks(
            &mut tasks,
            routed,
            ExpertMatrix::Down,
            (hidden, routed.width),
            &mut place,
        );
        if let Some((roles, width)) = mlp {
            let w = c.weights.matrix(self.layer, roles[2]);
            tasks.dense(w, &ws.mlp_acts[..n * padded(width)], shared);
        }
        tasks.run(c.isa);
    }

    /// Floats of a row that experts read.
    fn expert_stride(&self, cols: usize) -> usize {
        match self.c.form {
            ExpertForm::F16 => padded(cols),
            ExpertForm::Packed => permuted_len(cols),
            ExpertForm::PackedIntegers => integer_len(cols),
        }
    }

    /// An FP32 row as experts read it, narrowed to FP16 or to integers on the way.
    fn arrange(&self, row: &mut [f32], out: &mut [f32]) {
        if self.c.form == ExpertForm::PackedIntegers {
            arrange_integers(row, out);
            return;
        }
        if self.c.narrows() {
            narrow_row(row);
        }
        if self.c.form == ExpertForm::Packed {
            permute(row, out);
        } else {
            out[..row.len()].copy_from_slice(row);
            out[row.len()..].fill(0.0);
        }
    }

    /// Rows as experts read them, then one copy for each use, grouped by expert. A single row needs no copies.
    fn arrange_inputs(&self, ws: &mut Workspace, routed: &Routed<'_>, stride: usize) {
        if routed.groups.is_empty() {
            return;
        }
        let (n, hidden) = (self.rows, self.c.spec.hidden);
        let rows = &mut ws.expert_rows[..n * stride];
        let normed = ws.normed.par_chunks_exact(padded(hidden));
        let arranged = rows.par_chunks_exact_mut(stride).zip(normed).with_min_len(4);
        arranged.for_each_init(Vec::new, |row, (out, x)| {
            row.clear();
            row.extend_from_slice(&x[..hidden]);
            self.arrange(row, out);
        });
        if n == 1 {
            return;
        }
        let sources: Vec<usize> = routed
            .groups
            .iter()
            .flat_map(|g| g.uses.iter().map(|(row, _)| *row))
            .collect();
        let copies = ws.expert_inputs.par_chunks_exact_mut(stride).zip(&sources);
        copies
            .with_min_len(8)
            .for_each(|(out, row)| out.copy_from_slice(&rows[row * stride..][..stride]));
    }

    fn expert_tasks<'t>(
        &'t self,
        tasks: &mut Tasks<'t>,
        routed: &'t Routed<'_>,
        matrix: ExpertMatrix,
        (rows, cols): (usize, usize),
        slices: &mut Slices<'t>,
    ) {
        let single = self.rows == 1 && matrix != ExpertMatrix::Down;
        for (group, record) in routed.groups.iter().zip(&routed.records) {
            let uses = group.uses.len();
            let (x, rest) = slices.x.split_at(uses * slices.x_stride);
            // A single row is the input of every expert.
            slices.x = if single { slices.x } else { rest };
            let out = slices.take_out(uses * rows);
            let integers = self.c.form == ExpertForm::PackedIntegers;
            tasks.expert(integers, self.tiled().view(matrix, record), rows, cols, x, out);
        }
    }

    fn tiled(&self) -> &TiledLayout {
        self.c.tiled.as_ref().expect("a layer with experts has a tiling")
    }

    /// `silu(gate) * up` of every use and of the MLP's rows, narrowed and arranged for the down products.
    fn activate(&self, ws: &mut Workspace, routed: &Routed<'_>, act_stride: usize, mlp: Option<usize>) {
        let narrows = self.c.narrows();
        let Workspace {
            gate,
            up,
            expert_acts,
            mlp_acts,
            ..
        } = ws;
        let swiglu = |place: Place, width: usize, row: &mut Vec<f32>| {
            let at = place.start * width + place.column;
            let column = |m: &[f32]| {
                m[at..]
                    .iter()
                    .step_by(place.uses)
                    .take(width)
                    .copied()
                    .collect::<Vec<_>>()
            };
            row.clear();
            row.extend(column(gate).into_iter().zip(column(up)).map(|(g, u)| silu(g) * u));
        };
        let places = places_of(&routed.groups);
        if !places.is_empty() {
            let acts = expert_acts.par_chunks_exact_mut(act_stride).zip(&places);
            acts.for_each_init(Vec::new, |row, (out, place)| {
                swiglu(*place, routed.width, row);
                self.arrange(row, out);
            });
        }
        if let Some(width) = mlp {
            // The MLP's part of gate and up starts after all uses of the experts.
            let base = routed.uses() * routed.width;
            let (gate, up, n) = (&gate[base..], &up[base..], self.rows);
            let acts = mlp_acts.par_chunks_exact_mut(padded(width)).take(n).enumerate();
            acts.for_each(|(t, out)| {
                for (i, o) in out[..width].iter_mut().enumerate() {
                    *o = silu(gate[i * n + t]) * up[i * n + t];
                }
                out[width..].fill(0.0);
                if narrows {
                    narrow_row(&mut out[..width]);
                }
            });
        }
    }

    /// The weighted sum of each row's experts in ranking order, then its shared expert, into `ws.block`.
    fn combine(
        &self,
        ws: &mut Workspace,
        groups: &[ExpertRows],
        routing: &[Routing],
        gates: &[f32],
        shared: bool,
    ) {
        let (c, n, hidden) = (self.c, self.rows, self.c.spec.hidden);
        let top_k = routing[0].experts.len();
        let mut places = vec![Place::default(); n * top_k];
        for (place, (row, rank)) in places_of(groups)
            .into_iter()
            .zip(groups.iter().flat_map(|g| &g.uses))
        {
            // The experts' results stand after the shared expert's.
            places[row * top_k + rank] = Place {
                start: n + place.start,
                ..place
            };
        }
        let shared_place = |t| Place {
            start: 0,
            uses: n,
            column: t,
        };
        let down = &ws.down;
        let rows = ws
            .block
            .par_chunks_exact_mut(hidden)
            .zip(places.par_chunks_exact(top_k))
            .zip(routing);
        rows.enumerate()
            .with_min_len(2)
            .for_each_init(Vec::new, |column, (t, ((out, places), routing))| {
                out.fill(0.0);
                let shared = shared.then(|| (gates.get(t).copied().unwrap_or(1.0), shared_place(t)));
                let routed = routing.weights.iter().copied().zip(places.iter().copied());
                for (weight, place) in routed.chain(shared) {
                    let y = &down[place.start * hidden..][..hidden * place.uses];
                    let x = if place.uses == 1 {
                        y
                    } else {
                        column.clear();
                        column.extend(y.iter().skip(place.column).step_by(place.uses));
                        column.as_slice()
                    };
                    c.isa.run(AddScaled { weight, x, out });
                }
            });
    }
}

/// The routed experts of one wave and their records, in the same order.
#[derive(Default)]
struct Routed<'a> {
    groups: Vec<ExpertRows>,
    records: Vec<RecordGuard<'a>>,
    /// Rows of gate and up.
    width: usize,
    /// (row, rank) pairs of the waves before.
    before: usize,
}

impl Routed<'_> {
    /// (row, rank) pairs.
    fn uses(&self) -> usize {
        self.groups.iter().map(|g| g.uses.len()).sum()
    }
}

/// Where the result of each use lies, in the order of the groups.
fn places_of(groups: &[ExpertRows]) -> Vec<Place> {
    let mut start = 0;
    let mut places = Vec::new();
    for g in groups {
        places.extend((0..g.uses.len()).map(|column| Place {
            start,
            uses: g.uses.len(),
            column,
        }));
        start += g.uses.len();
    }
    places
}

/// Inputs and outputs of a phase, taken off group by group.
struct Slices<'a> {
    x: &'a [f32],
    x_stride: usize,
    out: &'a mut [f32],
}

impl<'a> Slices<'a> {
    fn take_out(&mut self, len: usize) -> &'a mut [f32] {
        let (out, rest) = std::mem::take(&mut self.out).split_at_mut(len);
        self.out = rest;
        out
    }
}

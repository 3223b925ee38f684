//! What the reference and the fast backend share around a step: checks, tickets, weights by role, grouping.

use std::collections::VecDeque;
use std::sync::Arc;

use half::f16;

use crate::backend::{BackendError, Regime, StepBatch, StepError, StepOutput, Ticket};
use crate::cpu::numerics::Routing;
use crate::dense::{DenseMatrix, DenseStore, held_tensors};
use crate::ids::{ExpertId, LayerId};
use crate::provider::{AcquireError, ExpertProvider, Hold, RoutedGroup, SlotAddress};
use crate::roles::{DenseRole, LayerRole};
use crate::spec::ModelSpec;
use crate::stage::{Stage, Tap, TapData};
use crate::transport::Completion;

/// Checks a batch against the rules of [`StepRow`](crate::backend::StepRow). `filled` holds, for each sequence,
/// how many positions its KV cache holds; it is brought up to date.
///
/// # Errors
/// [`StepError::Invalid`] naming the row and the limit; `filled` is then unchanged.
pub fn check_batch(
    spec: &ModelSpec,
    regime: &Regime,
    filled: &mut Vec<usize>,
    batch: &StepBatch,
) -> Result<(), StepError> {
    let invalid = |why: String| Err(StepError::Invalid(why));
    if batch.rows.is_empty() || batch.rows.len() > regime.max_rows {
        return invalid(format!(
            "{} rows; a step takes 1 to {}",
            batch.rows.len(),
            regime.max_rows
        ));
    }
    let mut after = filled.clone();
    let mut seen = vec![false; regime.sequences];
    for (i, row) in batch.rows.iter().enumerate() {
        if row.token as usize >= spec.vocab {
            return invalid(format!(
                "row {i}: token {} is outside the vocabulary of {}",
                row.token, spec.vocab
            ));
        }
        if row.position >= regime.context {
            return invalid(format!(
                "row {i}: position {} is outside the context of {}",
                row.position, regime.context
            ));
        }
        let Some(end) = after.get_mut(row.sequence) else {
            return invalid(format!(
                "row {i}: sequence {} of {}",
                row.sequence, regime.sequences
            ));
        };
        let follows = std::mem::replace(&mut seen[row.sequence], true);
        if row.position > *end || (follows && row.position != *end) {
            return invalid(format!(
                "row {i}: position {} does not follow position {end}",
                row.position
            ));
        }
        *end = row.position + 1;
    }
    *filled = after;
    Ok(())
}

/// Non-routed weights by role; complete by construction.
#[derive(Clone, Debug)]
pub struct Weights {
    store: Arc<DenseStore>,
}

impl Weights {
    /// Checks that `store` has every tensor of `spec`, with the right number of values.
    ///
    /// # Errors
    /// [`BackendError::MissingWeight`].
    pub fn new(
        backend: &'static str,
        spec: &ModelSpec,
        store: &Arc<DenseStore>,
    ) -> Result<Self, BackendError> {
        for t in held_tensors(spec, store.format()) {
            let held = store.matrix(t.role).map(|m| (m.rows() * m.cols(), m.cols()));
            if held != Some((t.values(), t.cols())) {
                return Err(BackendError::MissingWeight {
                    backend,
                    role: format!("{:?} of shape {:?}", t.role, t.shape),
                });
            }
        }
        Ok(Self { store: store.clone() })
    }

    /// The FP16 tensor of `role`, which the specification has.
    ///
    /// # Panics
    /// When the specification does not have it, or it is a matrix that is held as q8.
    #[must_use]
    pub fn get(&self, role: DenseRole) -> &[f16] {
        self.store.get(role).expect("checked when the model was opened")
    }

    /// A layer's matrix, as it is held.
    ///
    /// # Panics
    /// When the specification does not have it.
    #[must_use]
    pub fn matrix(&self, layer: LayerId, role: LayerRole) -> DenseMatrix<'_> {
        let matrix = self.store.matrix(DenseRole::Layer(layer, role));
        matrix.expect("checked when the model was opened")
    }

    /// A layer's FP16 tensor.
    #[must_use]
    pub fn layer(&self, layer: LayerId, role: LayerRole) -> &[f16] {
        self.get(DenseRole::Layer(layer, role))
    }

    /// A layer's norm or bias that only some specifications have.
    #[must_use]
    pub fn optional(&self, layer: LayerId, role: LayerRole) -> Option<&[f16]> {
        self.store.get(DenseRole::Layer(layer, role))
    }

    /// The output head: the embedding table when tied.
    ///
    /// # Panics
    /// Never: its presence was checked.
    #[must_use]
    pub fn head(&self) -> DenseMatrix<'_> {
        let matrix = self.store.matrix(self.store.head_role());
        matrix.expect("checked when the model was opened")
    }

    /// Writes row `token` of the embedding table: the start of the residual stream.
    pub fn embed(&self, token: u32, out: &mut [f32]) {
        let row = &self.get(DenseRole::Embedding)[token as usize * out.len()..][..out.len()];
        for (o, w) in out.iter_mut().zip(row) {
            *o = w.to_f32();
        }
    }
}

/// A step's outcome, kept between enqueue and finish.
#[derive(Debug, Default)]
pub struct Finished {
    next: u64,
    done: Vec<(u64, StepOutput)>,
}

impl Finished {
    /// Files an outcome under a fresh ticket.
    pub fn put(&mut self, output: StepOutput) -> Ticket {
        let id = self.next;
        self.next += 1;
        self.done.push((id, output));
        Ticket(id)
    }

    /// Takes the outcome of `ticket`.
    ///
    /// # Errors
    /// [`StepError::UnknownTicket`].
    pub fn take(&mut self, ticket: &Ticket) -> Result<StepOutput, StepError> {
        let at = self.done.iter().position(|(id, _)| *id == ticket.0);
        at.map(|i| self.done.swap_remove(i).1)
            .ok_or(StepError::UnknownTicket(ticket.0))
    }
}

/// The rows that use one expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertRows {
    /// Expert.
    pub expert: ExpertId,
    /// (row of the step, rank of the expert in that row's routing), by row.
    pub uses: Vec<(usize, usize)>,
}

/// Groups the routing of a step by expert, ascending.
#[must_use]
pub fn group_by_expert(experts: usize, routing: &[Routing]) -> Vec<ExpertRows> {
    let mut uses = vec![Vec::new(); experts];
    for (row, r) in routing.iter().enumerate() {
        for (rank, e) in r.experts.iter().enumerate() {
            uses[*e as usize].push((row, rank));
        }
    }
    (0u32..)
        .map(ExpertId)
        .zip(uses)
        .filter(|(_, uses)| !uses.is_empty())
        .map(|(expert, uses)| ExpertRows { expert, uses })
        .collect()
}

/// Times in a row that a wave is asked for while its transfers fail.
const ATTEMPTS: usize = 3;

/// Acquires the experts of `groups` wave by wave and hands each wave with its slot addresses to `run`. Everything
/// that `run` reads of the slots must be dropped when it returns.
///
/// # Errors
/// [`StepError`] when a wave cannot be had.
///
/// # Panics
/// When the provider gives experts that were not asked for.
pub fn for_each_wave(
    provider: &dyn ExpertProvider,
    hold: &mut Hold,
    layer: LayerId,
    groups: &[ExpertRows],
    mut run: impl FnMut(Vec<ExpertRows>, &[SlotAddress]),
) -> Result<(), StepError> {
    let ids: Vec<ExpertId> = groups.iter().map(|g| g.expert).collect();
    let mut waves: VecDeque<_> = provider.waves(hold, &RoutedGroup { layer, experts: &ids }).into();
    let mut failures = 0;
    while let Some(wave) = waves.pop_front() {
        let group = RoutedGroup {
            layer,
            experts: &wave,
        };
        let lease = match provider.acquire(hold, &group, Completion::DONE) {
            Ok(lease) => {
                failures = 0;
                lease
            }
            // Nothing was published: the same wave again.
            Err(AcquireError::Failed { .. }) if failures + 1 < ATTEMPTS => {
                failures += 1;
                waves.push_front(wave);
                continue;
            }
            // Somebody else's publication has changed what is missing.
            Err(AcquireError::TooLarge { .. }) => {
                let again = provider.waves(hold, &group);
                if again.len() < 2 {
                    return Err(AcquireError::TooLarge {
                        experts: wave.len(),
                        missing: wave.len(),
                    }
                    .into());
                }
                for part in again.into_iter().rev() {
                    waves.push_front(part);
                }
                continue;
            }
            Err(e) => return Err(e.into()),
        };
        let find = |e: &ExpertId| {
            groups
                .binary_search_by_key(e, |g| g.expert)
                .expect("a wave of this group")
        };
        run(
            wave.iter().map(|e| groups[find(e)].clone()).collect(),
            lease.wait()?,
        );
    }
    Ok(())
}

/// The two taps of a routing decision.
///
/// # Panics
/// When an expert id does not fit an `i32`.
#[must_use]
pub fn routing_taps(layer: LayerId, top_k: usize, routing: &[Routing]) -> [Tap; 2] {
    let ids = routing.iter().flat_map(|r| {
        r.experts
            .iter()
            .map(|e| i32::try_from(*e).expect("below MAX_EXPERTS"))
    });
    let weights = routing.iter().flat_map(|r| r.weights.iter().copied());
    [
        Tap {
            stage: Stage::TopkIndex(layer),
            width: top_k,
            data: TapData::I32(ids.collect()),
        },
        Tap {
            stage: Stage::TopkWeight(layer),
            width: top_k,
            data: TapData::F32(weights.collect()),
        },
    ]
}

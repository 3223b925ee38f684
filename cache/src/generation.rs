//! Generations: immutable maps of the whole model, and the reclamation of what they no longer hold.
//!
//! A generation lives as long as somebody holds it. A slot that a publication took out of the map becomes a spare
//! when every generation that still shows it has been let go (C9). Readers therefore never look at a slot's state:
//! what their generation maps to stays as it is while they hold the generation.

use std::collections::{BTreeSet, VecDeque};

use horizon_core::ids::GenerationId;
use horizon_core::transport::SlotId;

use crate::sync::{Arc, Condvar, Mutex, Shared, lock};

/// Slot of each expert of one layer.
pub type LayerMap = Vec<Option<SlotId>>;

/// One immutable map (layer, expert) → slot.
pub struct Generation {
    id: GenerationId,
    /// By position of the layer among those with routed experts.
    layers: Vec<Shared<LayerMap>>,
    retirement: Arc<Retirement>,
}

impl Generation {
    /// The first generation.
    pub(crate) fn first(layers: Vec<LayerMap>, retirement: &Arc<Retirement>) -> Self {
        Self::register(
            GenerationId(1),
            layers.into_iter().map(Into::into).collect(),
            retirement,
        )
    }

    /// The generation after this one, which differs in one layer.
    pub(crate) fn successor(&self, layer: usize, map: LayerMap) -> Self {
        let mut layers = self.layers.clone();
        layers[layer] = map.into();
        Self::register(GenerationId(self.id.0 + 1), layers, &self.retirement)
    }

    fn register(id: GenerationId, layers: Vec<Shared<LayerMap>>, retirement: &Arc<Retirement>) -> Self {
        lock(&retirement.state).alive.insert(id);
        Self {
            id,
            layers,
            retirement: retirement.clone(),
        }
    }

    /// Its number.
    #[must_use]
    pub fn id(&self) -> GenerationId {
        self.id
    }

    /// Slots of the experts of a layer, by position of the layer.
    #[must_use]
    pub fn layer(&self, layer: usize) -> &LayerMap {
        &self.layers[layer]
    }

    /// How many layers it maps.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.layers.len()
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.retirement.let_go(self.id);
    }
}

/// Slots between residency and spare, and the spares.
#[derive(Default)]
pub struct Retirement {
    state: Mutex<State>,
    /// Signalled whenever spares may have grown.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Generations that somebody holds, the current one included.
    alive: BTreeSet<GenerationId>,
    /// Victims, with the last generation that shows them; ascending.
    retiring: VecDeque<(GenerationId, Vec<SlotId>)>,
    /// Slots that nothing shows.
    spares: Vec<SlotId>,
}

impl State {
    fn reclaim(&mut self) {
        let oldest = self.alive.first().copied();
        while let Some((last, _)) = self.retiring.front() {
            if oldest.is_some_and(|o| o <= *last) {
                break;
            }
            let (_, slots) = self.retiring.pop_front().expect("looked at above");
            self.spares.extend(slots);
        }
    }
}

impl Retirement {
    /// Spares to begin with.
    #[must_use]
    pub fn with_spares(spares: Vec<SlotId>) -> Self {
        let retirement = Self::default();
        lock(&retirement.state).spares = spares;
        retirement
    }

    /// `victims` are in no generation after `last`.
    pub(crate) fn retire(&self, last: GenerationId, victims: Vec<SlotId>) {
        let mut state = lock(&self.state);
        state.retiring.push_back((last, victims));
        state.reclaim();
        self.changed.notify_all();
    }

    fn let_go(&self, id: GenerationId) {
        let mut state = lock(&self.state);
        state.alive.remove(&id);
        state.reclaim();
        self.changed.notify_all();
    }

    /// Takes `n` spares, or none.
    pub(crate) fn take(&self, n: usize) -> Option<Vec<SlotId>> {
        let mut state = lock(&self.state);
        (state.spares.len() >= n).then(|| {
            let keep = state.spares.len() - n;
            state.spares.split_off(keep)
        })
    }

    /// Gives spares back.
    pub(crate) fn put(&self, slots: Vec<SlotId>) {
        lock(&self.state).spares.extend(slots);
        self.changed.notify_all();
    }

    /// Blocks until spares may have grown to `n`, or a moment has passed.
    pub(crate) fn wait(&self, n: usize) {
        let state = lock(&self.state);
        if state.spares.len() >= n {
            return;
        }
        #[cfg(not(loom))]
        drop(
            self.changed
                .wait_timeout(state, std::time::Duration::from_millis(1)),
        );
        #[cfg(loom)]
        drop(self.changed.wait(state));
    }

    /// Spares, slots on their way to become spares, and generations alive.
    #[must_use]
    pub fn census(&self) -> Census {
        let state = lock(&self.state);
        Census {
            spares: state.spares.clone(),
            retiring: state
                .retiring
                .iter()
                .flat_map(|(_, s)| s.iter().copied())
                .collect(),
            generations: state.alive.len(),
        }
    }
}

/// Where slots are that the current generation does not show.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Census {
    /// Free to be written.
    pub spares: Vec<SlotId>,
    /// Shown only by generations that somebody still holds.
    pub retiring: Vec<SlotId>,
    /// Generations that somebody holds, the current one included.
    pub generations: usize,
}

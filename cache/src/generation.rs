//! Generations: immutable maps of the whole model, and the reclamation of what they no longer hold.
//!
//! A generation lives as long as somebody holds it. A slot that a publication took out of the map becomes a spare
//! when every generation that still shows it has been let go (C9): those from the one that put it into the map to the
//! last before the one that took it out. An older or newer holder does not keep it. Readers therefore never look at a
//! slot's state: what their generation maps to stays as it is while they hold the generation.

use std::collections::BTreeSet;

use horizon_core::ids::GenerationId;
use horizon_core::transport::SlotId;

use crate::seeded::{Bug, seeded};
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
    /// By slot: the generation that put it into the map.
    born: Vec<GenerationId>,
    /// Victims.
    retiring: Vec<Victim>,
    /// Slots that nothing shows.
    spares: Vec<SlotId>,
}

/// A slot that the generations from `born` to `last` show, and no other.
struct Victim {
    slot: SlotId,
    born: GenerationId,
    last: GenerationId,
}

impl State {
    /// Moves victims that nobody reads to the spares, and says whether there were any.
    fn reclaim(&mut self) -> bool {
        let (alive, spares) = (&self.alive, &mut self.spares);
        let before = spares.len();
        self.retiring.retain(|v| {
            let read = alive.range(v.born..=v.last).next().is_some() && !seeded(Bug::FreeVictimsAtOnce);
            if !read {
                spares.push(v.slot);
            }
            read
        });
        spares.len() > before
    }
}

impl Retirement {
    /// The first generation shows all of `slots` slots except `spares`.
    #[must_use]
    pub fn new(slots: usize, spares: Vec<SlotId>) -> Self {
        let retirement = Self::default();
        let mut state = lock(&retirement.state);
        state.born = vec![GenerationId(1); slots];
        state.spares = spares;
        drop(state);
        retirement
    }

    /// Generation `next` has been published: it and its successors show `placed`, and `victims` no longer.
    pub(crate) fn published(&self, next: GenerationId, placed: &[SlotId], victims: &[SlotId]) {
        let mut state = lock(&self.state);
        for slot in placed {
            state.born[slot.index()] = next;
        }
        let last = GenerationId(next.0 - 1);
        for slot in victims {
            let born = state.born[slot.index()];
            state.retiring.push(Victim {
                slot: *slot,
                born,
                last,
            });
        }
        if state.reclaim() {
            self.changed.notify_all();
        }
    }

    fn let_go(&self, id: GenerationId) {
        let mut state = lock(&self.state);
        state.alive.remove(&id);
        if state.reclaim() {
            self.changed.notify_all();
        }
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
            retiring: state.retiring.iter().map(|v| v.slot).collect(),
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

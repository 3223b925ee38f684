//! Residency changes no bit of what the tiny models and the demo models say: every capacity from k to E, every policy,
//! cold and warm, with transfers that fail before publication and are tried again.

use std::num::NonZeroUsize;
use std::sync::Arc;

use horizon_cache::{Geometry, HostStore, Policy, ResidentV1};
use horizon_core::artifact::Silent;
use horizon_core::backend::{Activations, Backend, Regime};
use horizon_core::cpu::FastCpu;
use horizon_core::cpu::transport::HostTransport;
use horizon_core::observe::Observation;
use horizon_core::provider::{ExpertProvider, FullyResident, SlotMemory};
use horizon_models::source::{ExpertsMode, LoadOptions, LoadedModel, ModelSource};

use crate::arm::Running;
use crate::files::{fixtures, ids, json};
use crate::flaky::{Faults, Flaky};
use crate::{demo, tiny};

/// Rows of a step: a prompt takes several, and one asks for more experts than most capacities hold.
const ROWS: usize = 16;
/// Tokens decoded after the prompt.
const NEW: usize = 6;

/// A model in memory, and what it is asked.
struct Subject {
    name: String,
    loaded: LoadedModel,
    tokens: Vec<u32>,
}

/// The bits of every logit of the prompt, and the tokens after it.
#[derive(PartialEq)]
struct Said(Vec<u32>, Vec<u32>);

impl Subject {
    fn new(name: &str, source: &ModelSource, tokens: Vec<u32>) -> Self {
        let options = LoadOptions {
            experts: ExpertsMode::default(),
            ..LoadOptions::default()
        };
        let loaded = source.load(&options, FastCpu::tiling(), &Silent);
        Self {
            name: name.to_owned(),
            loaded: loaded.unwrap_or_else(|e| panic!("{name}: {e}")),
            tokens,
        }
    }

    fn running(&self, slots: Arc<dyn SlotMemory>, experts: Arc<dyn ExpertProvider>) -> Running {
        let loaded = &self.loaded;
        let backend = FastCpu::new(NonZeroUsize::new(2), slots, loaded.encoding).expect("two threads");
        let regime = Regime {
            activations: Activations::F16,
            context: self.tokens.len() + NEW,
            sequences: 1,
            max_rows: ROWS,
        };
        let plan = backend.plan(&loaded.spec, &regime).expect("a plan");
        let model = backend.open(&loaded.spec, &plan, &loaded.dense).expect("opens");
        Running { model, experts }
    }

    fn say(&self, running: &mut Running) -> Said {
        let mut evaluator = running.evaluator();
        evaluator.chunk = ROWS;
        let logits = evaluator.sequence(&self.tokens, false).expect("runs").logits;
        let prompt = &self.tokens[..ROWS.min(self.tokens.len())];
        let tokens = running.greedy(prompt, NEW);
        Said(logits.iter().map(|v| v.to_bits()).collect(), tokens)
    }

    /// Compares every capacity and policy with full residency; experts missed and transactions failed.
    fn check(&self) -> (u64, u64) {
        let image = self.loaded.image.clone().expect("there are experts");
        let resident = Arc::new(FullyResident::new(image.clone()));
        let want = self.say(&mut self.running(image.clone(), resident));
        let moe = self.loaded.spec.moe().expect("there are experts");
        let (mut missed, mut failed) = (0, 0);
        for capacity in moe.top_k..=moe.experts {
            for policy in Policy::ALL {
                let geometry = Geometry {
                    layers: self.loaded.spec.moe_layers().collect(),
                    experts: moe.experts,
                    top_k: moe.top_k,
                    capacity,
                    spares: moe.top_k + capacity % 2,
                };
                let slots = HostTransport::new(geometry.slots(), 2, image.record_bytes()).expect("memory");
                let slots = Arc::new(slots);
                // Longer than a group, so that a second try succeeds.
                let every = Faults::Every(geometry.spares as u64 + 3);
                let placed = (geometry.layers.len() * capacity) as u64;
                let transport = Arc::new(Flaky::new(slots.clone(), placed, every));
                let store = Arc::new(HostStore::new(image.clone(), geometry.layers.clone()));
                let cache = ResidentV1::new(geometry, policy, store, transport).expect("sets up");
                let cache = Arc::new(cache);
                let mut running = self.running(slots, cache.clone());
                for run in ["cold", "warm"] {
                    assert!(
                        self.say(&mut running) == want,
                        "{}, capacity {capacity}, {policy}, {run}: other bits",
                        self.name
                    );
                }
                let total = cache.observations().total;
                let [misses, failures] = [total.misses, total.failures].map(|o| match o {
                    Observation::Observed(n) => n,
                    other => panic!("{other:?} is not counted"),
                });
                assert!(capacity < moe.experts || misses == 0, "{}: {misses}", self.name);
                missed += misses;
                failed += failures;
            }
        }
        (missed, failed)
    }
}

#[test]
fn no_tiny_model_depends_on_what_is_resident() {
    for model in tiny::MODELS {
        let (_dir, source) = tiny::source(model, "config.json");
        let index = json(&fixtures().join(model).join("index.json"));
        let subject = Subject::new(model, &source, ids(&index["sequences"]["s40"]));
        let (missed, failed) = subject.check();
        assert!(
            missed > 0 && failed > 0,
            "{model}: {missed} misses, {failed} failures"
        );
    }
}

#[test]
fn no_demo_model_depends_on_what_is_resident() {
    for model in demo::MODELS {
        let golden = demo::golden(model);
        let mut tokens = ids(&golden["prompts"][0]["ids"]);
        // Long enough for several steps.
        while tokens.len() < 2 * ROWS + 5 {
            tokens.extend_from_within(..);
        }
        tokens.truncate(2 * ROWS + 5);
        let subject = Subject::new(model, &demo::source(model), tokens);
        let (missed, failed) = subject.check();
        assert!(
            missed > 0 && failed > 0,
            "{model}: {missed} misses, {failed} failures"
        );
    }
}

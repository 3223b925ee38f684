//! Compares replacement policies on the routing of a model that writes stories: which of them keeps the experts of
//! the text in hand when a long prompt passes through? Prints the tables of `docs/results/policies.md`.
//!
//! ```text
//! cargo run --release -p horizon-runtime --example policies [-- MODEL [TRACE]]
//! ```
//!
//! MODEL is a checkpoint or an artifact; without it the embedded demo model runs. TRACE is where to keep the trace.

use std::error::Error;
use std::path::Path;

use horizon_cache::replay::{Contender, PolicyReplay, Tally, Workload, simulate};
use horizon_cache::trace::{Trace, TraceHeader, TraceWriter, VERSION};
use horizon_cache::{Geometry, Policy};
use horizon_core::artifact::Silent;
use horizon_core::backend::{Activations, PREFILL_CHUNK, StepBatch, StepRow};
use horizon_core::dense::DenseFormat;
use horizon_core::stage::{Stage, TapData};
use horizon_models::demo;
use horizon_models::source::{ExpertsMode, ModelSource};
use horizon_runtime::engine::{BackendChoice, BackendKind, Engine, EngineOptions, ModelIdentity};
use horizon_runtime::text::tokenizer;

/// How the stories begin.
const BEGINNINGS: [&str; 8] = [
    "Once upon a time, there was a little girl named",
    "One day, a boy went to the park with his",
    "Tom and his dog were playing in the garden when",
    "In a big forest there lived a small bear who",
    "The sun was shining and the birds",
    "Lily had a red ball. She wanted to",
    "It was raining, so mom said",
    "A clever fox and a slow turtle were friends. They",
];
/// Stories.
const STORIES: usize = 24;
/// Tokens of each story that are decoded.
const STORY: usize = 160;
/// After the first half of every so many-th story, a long prompt passes through: the stories so far since the last.
const BETWEEN: usize = 3;
/// Tokens after that which are counted apart.
const AFTER: usize = 16;

type Fallible<T> = Result<T, Box<dyn Error>>;

fn main() -> Fallible<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let source = match arguments.first() {
        Some(place) => ModelSource::open(Path::new(place))?,
        None => {
            let model = demo::embedded()?;
            ModelSource::in_memory(demo::EMBEDDED_NAME, model.files, model.safetensors)?
        }
    };
    let recording = Writer::new(&source)?.record()?;
    if let Some(place) = arguments.get(1) {
        recording.compose(true, false)?.trace.save(Path::new(place))?;
    }
    print_tables(&recording)
}

/// A model that writes, and the record of its routing.
struct Writer {
    engine: Engine,
    header: TraceHeader,
    beginnings: Vec<Vec<u32>>,
    context: usize,
    random: u64,
}

impl Writer {
    fn new(source: &ModelSource) -> Fallible<Self> {
        let tokenizer = tokenizer(source)?;
        let beginnings = BEGINNINGS.iter().map(|b| tokenizer.encode(b, true));
        let beginnings = beginnings.collect::<Result<_, _>>()?;
        let options = EngineOptions {
            backend: BackendChoice::Named(BackendKind::Cpu),
            executor: None,
            cache: None,
            experts: ExpertsMode::default(),
            dense: DenseFormat::F16,
            activations: Activations::F16,
            context: None,
            threads: None,
        };
        let engine = Engine::open(source, &options, &Silent)?;
        let spec = engine.spec();
        let moe = spec.moe().ok_or("the model has no routed experts")?;
        let header = TraceHeader {
            version: VERSION,
            model: ModelIdentity::of(source).place.display().to_string(),
            experts: moe.experts,
            top_k: moe.top_k,
            record_bytes: engine.layout().map_or(0, |l| l.bytes as u64),
            layers: spec.moe_layers().collect(),
        };
        Ok(Self {
            context: engine.settings().context,
            header,
            engine,
            beginnings,
            random: 1,
        })
    }

    /// Stories, each a sequence of its own, and the long prompts.
    fn record(mut self) -> Fallible<Recording> {
        let mut recording = Recording {
            stories: Vec::new(),
            prompts: Vec::new(),
        };
        let mut told = Vec::new();
        for i in 0..STORIES {
            let (tokens, trace) = self.story(self.beginnings[i % BEGINNINGS.len()].clone(), STORY)?;
            recording.stories.push(trace);
            told.extend(tokens);
            if (i + 1) % BETWEEN == 0 {
                told.truncate(self.context - 1);
                let prompt = std::mem::take(&mut told);
                recording.prompts.push(self.story(prompt, 1)?.1);
            }
        }
        Ok(recording)
    }

    /// Prefills `tokens`, then decodes `new` more, drawn by their probability; gives all of them, and the routing.
    fn story(&mut self, mut tokens: Vec<u32>, new: usize) -> Fallible<(Vec<u32>, Trace)> {
        let mut trace = TraceWriter::new(self.header.clone())?;
        let mut last = 0;
        for start in (0..tokens.len()).step_by(PREFILL_CHUNK) {
            let end = tokens.len().min(start + PREFILL_CHUNK);
            last = self.step(&tokens[start..end], start, &mut trace)?;
        }
        tokens.push(last);
        for _ in 1..new {
            let start = tokens.len() - 1;
            let next = self.step(&tokens[start..], start, &mut trace)?;
            tokens.push(next);
        }
        Ok((tokens, trace.finish()))
    }

    fn step(&mut self, tokens: &[u32], start: usize, trace: &mut TraceWriter) -> Fallible<u32> {
        let rows = tokens.iter().enumerate().map(|(i, token)| StepRow {
            token: *token,
            position: start + i,
            sequence: 0,
            logits: i + 1 == tokens.len(),
        });
        let batch = StepBatch {
            rows: rows.collect(),
            taps: true,
            ..StepBatch::default()
        };
        let evaluator = self.engine.evaluator();
        let ticket = evaluator.model.enqueue(&batch, evaluator.experts)?;
        let out = evaluator.model.finish(ticket)?;
        let mut rows: Vec<Vec<Vec<u16>>> = vec![Vec::new(); tokens.len()];
        for tap in &out.taps {
            if let (Stage::TopkIndex(_), TapData::I32(ids)) = (tap.stage, &tap.data) {
                for (row, ids) in rows.iter_mut().zip(ids.chunks(tap.width)) {
                    let ids = ids.iter().map(|e| u16::try_from(*e));
                    row.push(ids.collect::<Result<_, _>>()?);
                }
            }
        }
        trace.push_step(&rows)?;
        Ok(self.draw(&out.logits))
    }

    /// A token drawn by its probability.
    fn draw(&mut self, logits: &[f32]) -> u32 {
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f64> = logits.iter().map(|l| f64::from(l - most).exp()).collect();
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let mut left = (self.random >> 11) as f64 / (1u64 << 53) as f64 * weights.iter().sum::<f64>();
        let chosen = weights.iter().position(|w| {
            left -= w;
            left < 0.0
        });
        u32::try_from(chosen.unwrap_or(0)).unwrap_or_default()
    }
}

/// What was recorded, in pieces.
struct Recording {
    stories: Vec<Trace>,
    prompts: Vec<Trace>,
}

/// A trace put together, and which of its steps are the first after the place of a long prompt.
struct Composed {
    trace: Trace,
    after: Vec<bool>,
}

impl Recording {
    /// All stories in turn, with or without the long prompts in the middle of some. With `shift`, another text begins
    /// at every quarter: the same one, but in every second quarter each expert's part is played by another.
    fn compose(&self, prompts: bool, shift: bool) -> Fallible<Composed> {
        let header = self.stories[0].header();
        let mut writer = TraceWriter::new(header.clone())?;
        let mut after = Vec::new();
        let mut push = |flat: &[u16], turned: bool, counted: bool| -> Fallible<()> {
            let expert = |layer: usize, e: u16| {
                let by = if turned { 5 * (layer + 1) } else { 0 };
                u16::try_from((usize::from(e) + by) % header.experts)
            };
            let rows = flat.chunks_exact(header.layers.len() * header.top_k).map(|row| {
                let layers = row.chunks_exact(header.top_k).enumerate();
                layers
                    .map(|(l, chosen)| chosen.iter().map(|e| expert(l, *e)).collect())
                    .collect()
            });
            writer.push_step(&rows.collect::<Result<Vec<_>, _>>()?)?;
            after.push(counted);
            Ok(())
        };
        for (i, story) in self.stories.iter().enumerate() {
            let turned = shift && i * 4 / self.stories.len() % 2 == 1;
            let interrupted = (i + 1) % BETWEEN == 0;
            let half = story.steps() / 2;
            for (s, rows) in story.rows().enumerate() {
                if s == half && interrupted && prompts {
                    for rows in self.prompts[i / BETWEEN].rows() {
                        push(rows, turned, false)?;
                    }
                }
                let counted = interrupted && (half..half + AFTER).contains(&s);
                push(rows, turned, counted)?;
            }
        }
        Ok(Composed {
            trace: writer.finish(),
            after,
        })
    }
}

impl Composed {
    /// Hits and misses of the steps that are counted apart.
    fn tally(&self, workload: &Workload, geometry: Geometry, policy: Policy) -> Tally {
        let mut replay = PolicyReplay::new(geometry, policy);
        let mut tally = Tally::default();
        for group in workload.groups() {
            let misses = replay.acquire(group.layer, group.experts) as u64;
            if self.after[group.step] {
                tally += Tally {
                    hits: group.experts.len() as u64 - misses,
                    misses,
                };
            }
        }
        tally
    }
}

fn percent(tally: Tally) -> String {
    tally
        .hit_rate()
        .map_or_else(|| "none".into(), |rate| format!("{:.1}", 100.0 * rate))
}

/// Prints a table of decode hit rates, a column a capacity.
fn table(
    title: &str,
    contenders: &[Contender],
    capacities: &[usize],
    cell: impl Fn(Contender, usize) -> Fallible<Tally>,
) -> Fallible<()> {
    let columns: String = capacities.iter().map(|c| format!(" c{c} |")).collect();
    let rule = " ---: |".repeat(capacities.len());
    println!("\n{title}\n\n| policy |{columns}\n| --- |{rule}");
    for contender in contenders {
        let mut line = format!("| {contender} |");
        for capacity in capacities {
            line += &format!(" {} |", percent(cell(*contender, *capacity)?));
        }
        println!("{line}");
    }
    Ok(())
}

fn print_tables(recording: &Recording) -> Fallible<()> {
    let compositions = [
        recording.compose(true, false)?,
        recording.compose(false, false)?,
        recording.compose(true, true)?,
    ];
    let workloads = compositions.each_ref().map(|c| Workload::new(&c.trace));
    let full = workloads[0].geometry();
    let (header, trace) = (compositions[0].trace.header(), &compositions[0].trace);
    println!(
        "{}: {} layers, {} of {} experts; {} tokens in {} steps, {} expert requests",
        header.model,
        header.layers.len(),
        header.top_k,
        header.experts,
        trace.tokens(),
        trace.steps(),
        workloads[0].requests()
    );
    let capacities: Vec<usize> = (full.top_k..full.experts).step_by(2).collect();
    let decode = |i: usize| {
        let workload = &workloads[i];
        move |contender, capacity| Ok(simulate(workload, contender, capacity, full.top_k)?.decode)
    };
    let after = |i: usize| {
        let (composed, workload) = (&compositions[i], &workloads[i]);
        move |contender, capacity| match contender {
            Contender::Policy(policy) => {
                let spares = full.top_k;
                let geometry = Geometry {
                    capacity,
                    spares,
                    ..full.clone()
                };
                Ok(composed.tally(workload, geometry, policy))
            }
            Contender::Optimum => Err("the optimum is no policy".into()),
        }
    };
    let policies = Policy::ALL.map(Contender::Policy);
    table("All decode steps", &Contender::all(), &capacities, decode(0))?;
    let title = format!("The {AFTER} decode steps after a long prompt");
    table(&title, &policies, &capacities, after(0))?;
    table(
        "The same steps without the prompt",
        &policies,
        &capacities,
        after(1),
    )?;
    let title = "All decode steps, the text changing three times";
    table(title, &Contender::all(), &capacities, decode(2))
}

//! `horizon cache`: replacement policies compared on recorded routing, without a model.

use std::path::PathBuf;

use horizon_cache::replay::{Contender, Counts, Tally, Workload, simulate as replay};
use horizon_cache::trace::Trace;
use horizon_cache::{Geometry, INITIAL_PLACEMENT, Policy};
use horizon_core::ids::LayerId;
use serde::Serialize;

use crate::args::SimulateArgs;
use crate::output::{CliError, Output, bytes, table, thousands};

/// Capacities that are tried when none is given, about.
const CAPACITIES: usize = 8;

/// The object that `--json` prints.
#[derive(Serialize)]
struct SimulationReport {
    traces: Vec<PathBuf>,
    model: String,
    experts: usize,
    top_k: usize,
    layers: Vec<LayerId>,
    record_bytes: u64,
    tokens: usize,
    steps: usize,
    /// Experts asked for, all groups together.
    requests: usize,
    spares: usize,
    initial_placement: &'static str,
    results: Vec<Outcome>,
}

/// What one contender did at one capacity.
#[derive(Serialize)]
struct Outcome {
    capacity: usize,
    policy: Contender,
    #[serde(flatten)]
    total: Share,
    /// Bytes moved to the device.
    bytes: u64,
    /// Misses beyond those of the optimum, as a share of them; none where the optimum has no miss.
    over_optimum: Option<f64>,
    decode: Share,
    prefill: Share,
    layers: Vec<LayerShare>,
}

/// Hits and misses.
#[derive(Clone, Copy, Serialize)]
struct Share {
    #[serde(flatten)]
    tally: Tally,
    hit_rate: Option<f64>,
}

impl From<Tally> for Share {
    fn from(tally: Tally) -> Self {
        Self {
            hit_rate: tally.hit_rate(),
            tally,
        }
    }
}

/// Those of one layer.
#[derive(Serialize)]
struct LayerShare {
    layer: LayerId,
    #[serde(flatten)]
    share: Share,
}

/// Replays traces.
pub fn simulate(args: SimulateArgs) -> Result<(), CliError> {
    let out = Output::new(args.output);
    let traces = [args.traces, args.trace].concat();
    let mut files = traces.iter();
    // The command line asks for one at least.
    let first = files
        .next()
        .ok_or_else(|| CliError::usage("there is no trace to replay"))?;
    let mut trace = Trace::load(first)?;
    for file in files {
        trace
            .append(&Trace::load(file)?)
            .map_err(|e| CliError::failed(format!("{}: {e}", file.display())))?;
    }
    if trace.tokens() == 0 {
        return Err(CliError::failed(format!(
            "{}: no token was recorded",
            first.display()
        )));
    }
    let workload = Workload::new(&trace);
    let model = workload.geometry();
    let spares = args.spares.unwrap_or(model.top_k);
    let capacities = capacities(model, &args.capacity, spares)?;
    let policies = policies(&args.policy);
    let mut results = Vec::new();
    for capacity in capacities {
        let run = |contender| {
            replay(&workload, contender, capacity, spares).map_err(|e| CliError::usage(e.to_string()))
        };
        let best = run(Contender::Optimum)?;
        for policy in &policies {
            let counts = run(Contender::Policy(*policy))?;
            results.push(Outcome::new(
                model,
                capacity,
                Contender::Policy(*policy),
                &counts,
                &best,
            ));
        }
        results.push(Outcome::new(model, capacity, Contender::Optimum, &best, &best));
    }
    let header = trace.header();
    let report = SimulationReport {
        model: header.model.clone(),
        experts: header.experts,
        top_k: header.top_k,
        layers: header.layers.clone(),
        record_bytes: header.record_bytes,
        tokens: trace.tokens(),
        steps: trace.steps(),
        requests: workload.requests(),
        traces,
        spares,
        initial_placement: INITIAL_PLACEMENT,
        results,
    };
    out.result(&report, || text(&report))
}

/// What was asked for, checked, or a choice between the fewest and all.
fn capacities(model: &Geometry, asked: &[usize], spares: usize) -> Result<Vec<usize>, CliError> {
    let (least, most) = (model.top_k, model.experts);
    let mut capacities = match asked {
        [] => (least..most)
            .step_by((most - least).div_ceil(CAPACITIES).max(1))
            .chain([most])
            .collect(),
        asked => asked.to_vec(),
    };
    capacities.sort_unstable();
    capacities.dedup();
    for capacity in &capacities {
        let geometry = Geometry {
            capacity: *capacity,
            spares,
            ..model.clone()
        };
        geometry.check().map_err(|e| CliError::usage(e.to_string()))?;
    }
    let slots = model.layers.len() * most;
    if spares > slots {
        return Err(CliError::usage(format!(
            "--spares {spares}: the model has {slots} routed experts in all"
        )));
    }
    Ok(capacities)
}

/// Each policy once, in the order asked for.
fn policies(asked: &[Policy]) -> Vec<Policy> {
    let mut policies: Vec<Policy> = Vec::new();
    for policy in if asked.is_empty() { &Policy::ALL } else { asked } {
        if !policies.contains(policy) {
            policies.push(*policy);
        }
    }
    policies
}

impl Outcome {
    fn new(model: &Geometry, capacity: usize, policy: Contender, counts: &Counts, best: &Counts) -> Self {
        let (total, least) = (counts.total(), best.total().misses);
        let layers = model.layers.iter().zip(&counts.layers);
        Self {
            capacity,
            policy,
            total: total.into(),
            bytes: counts.bytes,
            over_optimum: (least > 0).then(|| total.misses as f64 / least as f64 - 1.0),
            decode: counts.decode.into(),
            prefill: counts.prefill.into(),
            layers: layers
                .map(|(layer, tally)| LayerShare {
                    layer: *layer,
                    share: Share::from(*tally),
                })
                .collect(),
        }
    }
}

fn text(r: &SimulationReport) -> String {
    let percent = |share: Option<f64>| share.map_or_else(|| "-".into(), |s| format!("{:.1} %", s * 100.0));
    let head = [
        "-c",
        "policy",
        "hit rate",
        "decode",
        "prefill",
        "misses",
        "moved",
        "over optimum",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(r.results.iter().map(|o| {
        vec![
            o.capacity.to_string(),
            o.policy.to_string(),
            percent(o.total.hit_rate),
            percent(o.decode.hit_rate),
            percent(o.prefill.hit_rate),
            thousands(o.total.tally.misses),
            bytes(o.bytes),
            match o.policy {
                Contender::Optimum => String::new(),
                Contender::Policy(_) => o
                    .over_optimum
                    .map_or_else(|| "-".into(), |s| format!("{:+.1} %", s * 100.0)),
            },
        ]
    }));
    format!(
        "{}: {} layers, {} of {} experts a token, {} an expert\n{} tokens in {} steps ask for {} experts; {} spare \
         slots\n{}",
        r.model,
        r.layers.len(),
        r.top_k,
        r.experts,
        bytes(r.record_bytes),
        thousands(r.tokens as u64),
        thousands(r.steps as u64),
        thousands(r.requests as u64),
        r.spares,
        table(&rows)
    )
}

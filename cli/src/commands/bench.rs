//! `horizon bench`: decode speed against memory bandwidth, and synthetic checkpoints.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use horizon_core::record::RecordLayout;
use horizon_core::spec::ModelSpec;
use horizon_core::synthetic::{Shape, SyntheticSpec, write_checkpoint};
use horizon_models::source::{ModelSource, SourceKind};
use horizon_runtime::bandwidth::Bandwidth;
use horizon_runtime::device::Device;
use horizon_runtime::disk::{Destination, ReadRate, drop_from_cache, read_rate};
use horizon_runtime::engine::{self, Engine, EngineOptions, HostMemory, OpenTimings, Settings, context};
use horizon_runtime::footprint::BytesPerToken;
use horizon_runtime::process::AnonymousPeak;
use horizon_runtime::residency::ResidencyReport;
use horizon_runtime::routing_load::{RoutingLoad, random_tokens};
use horizon_runtime::sampler::Sampling;
use horizon_runtime::session::{Answer, Request, TextDecoder, TextError};
use serde::Serialize;
use serde_json::json;

use super::report::residency_line;
use super::trace::{self, TraceReport, Tracing};
use super::{floor, model};
use crate::args::{BenchDecodeArgs, MakeCheckpointArgs};
use crate::output::{Bar, CliError, Output, bytes, table};
use crate::resolve::{ModelPlace, engine_options};

/// The object that `--json` prints.
#[derive(Serialize)]
struct DecodeReport {
    decode_tokens_per_second: f64,
    bytes_per_token: BytesPerToken,
    memory_bandwidth: Bandwidth,
    /// tokens/s times bytes a token, over the bandwidth.
    fraction_of_bandwidth: f64,
    prompt_tokens: usize,
    generated_tokens: usize,
    prefill_tokens_per_second: f64,
    cold_start: ColdStart,
    peak_rss_anon_bytes: Option<u64>,
    predicted: HostMemory,
    /// Measured peak over prediction.
    peak_over_predicted: Option<f64>,
    routing_load: Option<RoutingLoad>,
    #[serde(flatten)]
    residency: ResidencyReport,
    trace: Option<TraceReport>,
    settings: Settings,
}

/// From the start of the process to the first token, in seconds.
#[derive(Serialize)]
struct ColdStart {
    /// Files opened and checked, before the weights.
    open_files_s: f64,
    #[serde(flatten)]
    open: OpenTimings,
    /// The prompt.
    prefill_s: f64,
    /// All of it.
    first_token_s: f64,
    /// Whether the files were dropped from the page cache before.
    page_cache: &'static str,
    /// The same files read by the same threads and nothing done with them; none for a model within the program.
    read: Vec<ReadComparison>,
}

/// Reading alone.
#[derive(Serialize)]
struct ReadComparison {
    #[serde(flatten)]
    rate: ReadRate,
    /// `first_token_s` over the time that reading alone takes.
    first_token_over_read: f64,
}

/// Measures decode speed.
pub fn decode(args: BenchDecodeArgs, process_started: Instant) -> Result<(), CliError> {
    let out = Output::new(args.output);
    let options = engine_options(&args.model.execution)?;
    let place = ModelPlace::of(args.model.model.as_deref());
    let mut m = measure(&args, &options, &place, process_started, &out.progress())?;
    // Only now: the buffer of this measurement is no part of the model's memory.
    let pool = engine::pool(m.settings.threads)?;
    let memory_bandwidth = floor::bandwidth(m.device.as_ref(), &m.settings)?;
    m.cold_start.compare(&m.files, args.cold, &pool)?;
    let (prompt_tokens, generated_tokens) = (args.prompt_tokens as usize, m.answer.token_ids.len());
    let positions = prompt_tokens..prompt_tokens + generated_tokens - 1;
    let bytes_per_token = floor::mean_bytes(&m.spec, m.layout.as_ref(), &m.settings, positions);
    let rate = m
        .answer
        .decode_tokens_per_second()
        .ok_or_else(|| CliError::failed("too few tokens were generated to tell a rate"))?;
    let report = DecodeReport {
        decode_tokens_per_second: rate,
        fraction_of_bandwidth: rate * bytes_per_token.total as f64 / memory_bandwidth.bytes_per_second,
        bytes_per_token,
        memory_bandwidth,
        prompt_tokens,
        generated_tokens,
        prefill_tokens_per_second: prompt_tokens as f64 / m.answer.timings.first_token_s,
        cold_start: m.cold_start,
        peak_rss_anon_bytes: m.peak,
        peak_over_predicted: m.peak.map(|p| p as f64 / m.predicted.total as f64),
        predicted: m.predicted,
        routing_load: m.routing_load,
        residency: m.residency,
        trace: m.trace,
        settings: m.settings,
    };
    out.result(&report, || text(&report))
}

/// What one run of the model gave.
struct Measured {
    files: Vec<PathBuf>,
    spec: Arc<ModelSpec>,
    layout: Option<RecordLayout>,
    device: Option<Device>,
    settings: Settings,
    predicted: HostMemory,
    answer: Answer,
    peak: Option<u64>,
    cold_start: ColdStart,
    routing_load: Option<RoutingLoad>,
    residency: ResidencyReport,
    trace: Option<TraceReport>,
}

/// Opens the model, generates, and closes it.
fn measure(
    args: &BenchDecodeArgs,
    options: &EngineOptions,
    place: &ModelPlace,
    mut started: Instant,
    bar: &Bar,
) -> Result<Measured, CliError> {
    let watch = AnonymousPeak::watch();
    if args.cold {
        drop_from_cache(&weight_files(&model::open(place, bar)?))?;
        started = Instant::now();
    }
    let source = model::open(place, bar)?;
    let (asked, context) = (
        args.prompt_tokens as usize + args.tokens as usize,
        context(source.spec(), options)?,
    );
    if asked > context {
        return Err(CliError::failed(format!(
            "--prompt-tokens and --tokens: {asked} tokens do not fit the context of {context}"
        )));
    }
    trace::check(args.trace.as_deref(), source.spec())?;
    let files = weight_files(&source);
    let open_files_s = started.elapsed().as_secs_f64();
    let engine = Engine::open(&source, options, bar).map_err(model::refused)?;
    drop(source);
    bar.finish();
    model::note_fit(&engine, bar);
    let (settings, predicted, open) = (
        engine.settings().clone(),
        engine.memory().clone(),
        engine.timings(),
    );
    let (spec, layout) = (engine.spec().clone(), engine.layout().cloned());
    let device = engine.device();
    let request = request(args, &spec);
    let residency = engine.residency();
    let tracing = Tracing::of(args.trace.as_deref(), &engine)?;
    let mut session = engine.into_session();
    let traced = tracing.begin(&mut session);
    let before_s = started.elapsed().as_secs_f64();
    let answer = session.generate(&request, &mut NoText, &AtomicBool::new(false), &mut |_| {})?;
    let residency = ResidencyReport::new(&settings, &residency);
    let peak = watch.peak_bytes();
    drop(watch);
    let trace = trace::save(traced, &mut session)?;
    let routing_load = match args.routing_load {
        Some(most) => {
            let (n, e) = (most.min(settings.context), session.evaluator());
            RoutingLoad::measure(e.model, e.experts, &spec, n, e.chunk, args.seed)?
        }
        None => None,
    };
    let prefill_s = answer.timings.first_token_s;
    let cold_start = ColdStart {
        open_files_s,
        open,
        prefill_s,
        first_token_s: before_s + prefill_s,
        page_cache: if args.cold { "dropped" } else { "as it was" },
        read: Vec::new(),
    };
    Ok(Measured {
        files,
        spec,
        layout,
        device,
        settings,
        predicted,
        answer,
        peak,
        cold_start,
        routing_load,
        residency,
        trace,
    })
}

/// A prompt drawn at random, and as many tokens after it as were asked for.
fn request(args: &BenchDecodeArgs, spec: &ModelSpec) -> Request {
    Request {
        prompt: random_tokens(spec.vocab, args.seed)
            .take(args.prompt_tokens as usize)
            .collect(),
        sampling: Sampling::default(),
        max_tokens: Some(args.tokens as usize),
        ..Request::default()
    }
}

impl ColdStart {
    /// Reads the same files for comparison.
    fn compare(&mut self, files: &[PathBuf], cold: bool, pool: &rayon::ThreadPool) -> Result<(), CliError> {
        for into in [Destination::ReusedBuffers, Destination::NewMemory] {
            if files.is_empty() {
                break;
            }
            if cold {
                drop_from_cache(files)?;
            }
            let rate = pool.install(|| read_rate(files, into))?;
            let first_token_over_read = self.first_token_s * rate.bytes_per_second / rate.bytes as f64;
            self.read.push(ReadComparison {
                rate,
                first_token_over_read,
            });
        }
        Ok(())
    }
}

/// Weight files of a model on disk.
fn weight_files(source: &ModelSource) -> Vec<PathBuf> {
    match (source.kind(), source.artifact(), source.checkpoint()) {
        (SourceKind::Artifact, Some(a), _) => a
            .manifest()
            .shards
            .iter()
            .map(|s| a.dir().join(&s.name))
            .collect(),
        (SourceKind::Checkpoint, _, Some(c)) => c.shards().iter().map(|s| c.place().join(&s.name)).collect(),
        _ => Vec::new(),
    }
}

fn text(r: &DecodeReport) -> String {
    let gb = |b: f64| format!("{:.2} GB/s", b / 1e9);
    let b = &r.bytes_per_token;
    let mut out = format!(
        "decode {:.2} tok/s, {} tokens after a prompt of {}; prefill {:.1} tok/s\n\
         bytes a token {} (non-routed {}, output head {}, routed {}, KV {})\n\
         {} of {} measured here ({}): {:.1} %\n",
        r.decode_tokens_per_second,
        r.generated_tokens,
        r.prompt_tokens,
        r.prefill_tokens_per_second,
        bytes(b.total),
        bytes(b.dense),
        bytes(b.head),
        bytes(b.routed),
        bytes(b.kv),
        gb(r.decode_tokens_per_second * b.total as f64),
        gb(r.memory_bandwidth.bytes_per_second),
        r.memory_bandwidth.memory,
        r.fraction_of_bandwidth * 100.0
    );
    let c = &r.cold_start;
    out.push_str(&format!(
        "first token after {:.3} s (files {:.3}, weights {:.3}, buffers {:.3}, prompt {:.3}), page cache {}\n",
        c.first_token_s, c.open_files_s, c.open.load_s, c.open.open_s, c.prefill_s, c.page_cache
    ));
    for ReadComparison {
        rate,
        first_token_over_read,
    } in &c.read
    {
        let (size, speed) = (bytes(rate.bytes), gb(rate.bytes_per_second));
        let into = match rate.into {
            Destination::ReusedBuffers => "small buffers",
            Destination::NewMemory => "new memory",
        };
        out.push_str(&format!(
            "  {first_token_over_read:.2} x reading {size} into {into} at {speed}\n"
        ));
    }
    let total = bytes(r.predicted.total);
    match (r.peak_rss_anon_bytes, r.peak_over_predicted) {
        (Some(peak), Some(over)) => {
            let (peak, percent) = (bytes(peak), (over - 1.0) * 100.0);
            out.push_str(&format!(
                "peak anonymous memory {peak}, predicted {total} ({percent:+.1} %)\n"
            ));
        }
        _ => out.push_str(&format!(
            "peak anonymous memory unknown on this system, predicted {total}\n"
        )),
    }
    if let Some(load) = &r.routing_load {
        out.push_str(&routing(load));
    }
    if let Some(line) = residency_line(&r.residency) {
        out.push_str(&format!("{line}\n"));
    }
    if let Some(trace) = &r.trace {
        out.push_str(&format!("{}\n", trace.line()));
    }
    let s = &r.settings;
    if let Some(memory) = &s.device_memory {
        out.push_str(&format!("{}\n", memory.line()));
    }
    out.push_str(&format!(
        "executor {}, non-routed weights {}, {} threads\n",
        s.decode_executor.0, s.dense, s.threads
    ));
    out
}

fn routing(load: &RoutingLoad) -> String {
    let head = ["layer", "least", "median", "most", "repeated"]
        .map(str::to_owned)
        .to_vec();
    let mut rows = vec![head];
    rows.extend(load.layers.iter().map(|l| {
        let percent = format!("{:.0} %", l.repeated * 100.0);
        vec![
            l.layer.0.to_string(),
            l.least.to_string(),
            l.median.to_string(),
            l.most.to_string(),
            percent,
        ]
    }));
    format!(
        "tokens an expert had of {} (even: {:.1}); experts that the token before used too (by chance: {:.0} %)\n{}",
        load.tokens,
        load.even(),
        load.repeated_by_chance() * 100.0,
        table(&rows)
    )
}

/// Nobody reads the text of a measurement.
struct NoText;

impl TextDecoder for NoText {
    fn push(&mut self, _: u32) -> Result<String, TextError> {
        Ok(String::new())
    }

    fn finish(&mut self) -> Result<String, TextError> {
        Ok(String::new())
    }
}

/// Writes a synthetic checkpoint.
pub fn make_checkpoint(args: MakeCheckpointArgs) -> Result<(), CliError> {
    let out = Output::new(args.out);
    let mut shape = Shape::named(&args.shape).map_err(|e| CliError::usage(format!("--shape: {e}")))?;
    if let Some(layers) = args.layers {
        shape.layers = layers.get();
    }
    let spec = SyntheticSpec::new(shape, args.seed);
    let bar = out.progress();
    let summary = write_checkpoint(&args.output, &spec, &bar)?;
    bar.finish();
    let object = json!({
        "output": args.output,
        "title": spec.title(),
        "seed": args.seed,
        "tensors": summary.tensors,
        "files": summary.files,
        "data_bytes": summary.data_bytes,
        "file_bytes": summary.file_bytes,
    });
    out.result(&object, || {
        let (n, files, size) = (summary.tensors, summary.files, bytes(summary.file_bytes));
        format!(
            "{}: {}, {n} tensors in {files} files, {size}\n",
            args.output.display(),
            spec.title()
        )
    })
}

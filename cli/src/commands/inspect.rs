//! `horizon inspect`: what a model is made of and what it needs.

use horizon_core::artifact::manifest::{DTypeRecord, LayerError, MANIFEST_FILE};
use horizon_core::artifact::{VerifySummary, verify};
use horizon_core::backend::Activations;
use horizon_core::dense::DenseFormat;
use horizon_core::dtype::DType;
use horizon_core::ids::LayerId;
use horizon_core::record::{Canonical, RecordLayout};
use horizon_core::roles::{ExpertMatrix, dense_tensors, expert_tensors};
use horizon_core::spec::ModelSpec;
use horizon_models::source::{ExpertsMode, LoadOptions, ModelSource};
use horizon_runtime::engine::{
    self, EngineOptions, ExpertsRecord, HostMemory, ModelIdentity, predict_host_memory,
};
use horizon_runtime::footprint::{BytesPerToken, GpuMemory, gpu_memory, parameters};
use serde::Serialize;

use super::inspect_text;
use super::model;
use crate::args::InspectArgs;
use crate::output::{Bar, CliError, Output};
use crate::resolve::{ModelPlace, engine_options};

/// Weights above which the quantization error of a checkpoint is only measured when asked for.
const MEASURE_FREELY_BYTES: u64 = 1 << 30;

/// The object that `--json` prints.
#[derive(Serialize)]
pub struct Inspection {
    /// Which model.
    pub model: ModelIdentity,
    /// The model as data.
    pub spec: ModelSpec,
    /// Values, all and those that one token passes.
    pub parameters: Parameters,
    /// Element types, each by itself.
    pub dtypes: DTypeRecord,
    /// How the experts are held, or would be.
    pub experts: ExpertsRecord,
    /// How the non-routed weights would be held and executed. What an artifact or a checkpoint stores is another field.
    pub dense: DenseFormat,
    /// Sizes.
    pub sizes: Sizes,
    /// What quantization lost, by layer; `None` if it was not measured.
    pub quantization_error: Option<Vec<LayerLoss>>,
    /// What a decode step at position 0 reads.
    pub bytes_per_token: BytesPerToken,
    /// Host memory on the backend.
    pub host_memory: HostMemory,
    /// GPU memory of each capacity.
    pub gpu_memory: GpuTable,
    /// What `--verify` found, all of it sound.
    pub verified: Option<VerifySummary>,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// Numbers of values.
#[derive(Serialize)]
pub struct Parameters {
    /// All.
    pub total: u64,
    /// Those that one token passes.
    pub active: u64,
}

/// Sizes on the disk and in records.
#[derive(Serialize)]
pub struct Sizes {
    /// Weight files.
    pub file_bytes: u64,
    /// Number of weight files.
    pub files: usize,
    /// One expert's record: codes, scales, alignment.
    pub record_bytes: Option<usize>,
    /// The same without alignment.
    pub record_payload_bytes: Option<usize>,
    /// All routed experts.
    pub routed_bytes: u64,
    /// Non-routed weights.
    pub dense_bytes: u64,
}

/// What quantization did to a layer.
#[derive(Serialize)]
pub struct LayerLoss {
    /// Layer.
    pub layer: LayerId,
    /// Root of squared error over squared norm.
    pub relative_rmse: f64,
    /// Σ (w − ŵ)².
    pub squared_error: f64,
    /// Σ w².
    pub squared_norm: f64,
}

impl From<&LayerError> for LayerLoss {
    fn from(e: &LayerError) -> Self {
        let LayerError {
            layer,
            squared_error,
            squared_norm,
        } = *e;
        Self {
            layer,
            relative_rmse: e.relative_rmse(),
            squared_error,
            squared_norm,
        }
    }
}

/// GPU memory by capacity.
#[derive(Serialize)]
pub struct GpuTable {
    /// Positions of the KV cache.
    pub context: usize,
    /// One expert record: the least that pinned host staging must hold.
    pub least_staging_bytes: usize,
    /// What the sums do not contain.
    pub not_included: &'static str,
    /// From k to E.
    pub capacities: Vec<GpuMemory>,
}

/// Looks at a model.
pub fn inspect(args: InspectArgs) -> Result<(), CliError> {
    let out = Output::new(args.output);
    let options = engine_options(&args.model.execution)?;
    let place = ModelPlace::of(args.positional.as_deref().or(args.model.model.as_deref()));
    let bar = out.progress();
    // Before opening: verification lists everything that is wrong, opening stops at the first.
    let verified = if args.verify {
        Some(verified(&place, &options, &bar)?)
    } else {
        None
    };
    let source = model::open(&place, &bar)?;
    let measured = measure(&source, options.experts, args.measure, &options, &bar)?;
    bar.finish();
    let inspection = collect(&source, &options, measured, verified)?;
    out.result(&inspection, || inspect_text::text(&inspection))
}

fn verified(place: &ModelPlace, options: &EngineOptions, bar: &Bar) -> Result<VerifySummary, CliError> {
    let ModelPlace::Path(path) = place else {
        return Err(CliError::usage(
            "--verify: only a packed artifact records what to verify against",
        ));
    };
    if path.is_dir() && !path.join(MANIFEST_FILE).exists() {
        return Err(CliError::failed(format!(
            "{}: there is no {MANIFEST_FILE}, so there is nothing to verify against; `horizon pack` makes an \
             artifact that has one",
            path.display()
        )));
    }
    let pool = engine::pool(options.threads.map_or(0, Into::into))?;
    pool.install(|| verify(path, bar))
        .map_err(|problems| CliError::Several {
            summary: format!("{}: {} problem(s)", path.display(), problems.len()),
            problems: problems.iter().map(ToString::to_string).collect(),
        })
}

/// The quantization error of each layer: recorded in an artifact, measured by quantizing a checkpoint.
fn measure(
    source: &ModelSource,
    experts: ExpertsMode,
    asked: bool,
    options: &EngineOptions,
    bar: &Bar,
) -> Result<Option<Vec<LayerError>>, CliError> {
    if let Some(artifact) = source.artifact() {
        return Ok(Some(artifact.manifest().quantization_error.clone()));
    }
    let bytes: u64 = source
        .checkpoint()
        .map_or(0, |c| c.shards().iter().map(|s| s.bytes).sum());
    if experts == ExpertsMode::F16 || !(asked || bytes <= MEASURE_FREELY_BYTES) {
        return Ok(None);
    }
    let load = LoadOptions {
        experts,
        ..LoadOptions::default()
    };
    let pool = engine::pool(options.threads.map_or(0, Into::into))?;
    let loaded = pool.install(|| source.load(&load, &Canonical, bar))?;
    Ok(Some(loaded.quantization_error))
}

fn collect(
    source: &ModelSource,
    options: &EngineOptions,
    measured: Option<Vec<LayerError>>,
    verified: Option<VerifySummary>,
) -> Result<Inspection, CliError> {
    let spec = source.spec();
    let encoding = engine::encoding(source, options.experts);
    let layout = RecordLayout::new(spec, encoding);
    let host_memory = predict_host_memory(source, options).map_err(model::refused)?;
    let context = options
        .context
        .unwrap_or(spec.context.min(engine::DEFAULT_CONTEXT));
    let (total, active) = parameters(spec);
    let (file_bytes, files) = weight_files(source);
    let records = spec.moe().map_or(0, |m| m.experts) * spec.moe_layers().count();
    Ok(Inspection {
        model: ModelIdentity::of(source),
        parameters: Parameters { total, active },
        dtypes: dtypes(source, options.activations, options.experts)?,
        experts: ExpertsRecord::new(encoding, engine::quantizer(source, options.experts)),
        dense: options.dense,
        sizes: Sizes {
            file_bytes,
            files,
            record_bytes: layout.as_ref().map(|l| l.bytes),
            record_payload_bytes: layout.as_ref().map(RecordLayout::payload_bytes),
            routed_bytes: layout.as_ref().map_or(0, |l| (l.bytes * records) as u64),
            dense_bytes: host_memory.weights.dense,
        },
        quantization_error: measured.map(|m| m.iter().map(LayerLoss::from).collect()),
        bytes_per_token: BytesPerToken::at(spec, layout.as_ref(), options.dense, options.activations, 0),
        host_memory,
        gpu_memory: GpuTable {
            context,
            least_staging_bytes: layout.as_ref().map_or(0, |l| l.bytes),
            not_included: "workspaces, graphs and the driver's own memory",
            capacities: layout
                .as_ref()
                .map(|l| gpu_memory(spec, l, options.dense, context))
                .unwrap_or_default(),
        },
        spec: spec.as_ref().clone(),
        verified,
        notes: source.notes().to_vec(),
    })
}

fn weight_files(source: &ModelSource) -> (u64, usize) {
    match (source.artifact(), source.checkpoint()) {
        (Some(a), _) => (a.bytes(), a.manifest().shards.len()),
        (None, Some(c)) => (c.shards().iter().map(|s| s.bytes).sum(), c.shards().len()),
        (None, None) => (0, 0),
    }
}

/// Every dtype field: of the artifact's manifest, or what packing the checkpoint would record.
fn dtypes(
    source: &ModelSource,
    activations: Activations,
    experts: ExpertsMode,
) -> Result<DTypeRecord, CliError> {
    let mut record = match (source.artifact(), source.checkpoint()) {
        (Some(artifact), _) => artifact.manifest().dtypes.clone(),
        (None, Some(checkpoint)) => {
            let (spec, names) = (source.spec(), source.names());
            let width = spec.moe().map_or(0, |m| m.width);
            let mut routed = Vec::new();
            for role in expert_tensors(spec) {
                let shape = match role.matrix {
                    ExpertMatrix::Gate | ExpertMatrix::Up => [width, spec.hidden],
                    ExpertMatrix::Down => [spec.hidden, width],
                };
                routed.push(checkpoint.tensor(&names.expert(role), &shape)?.dtype);
            }
            let mut all = routed.clone();
            for (role, shape) in dense_tensors(spec) {
                all.push(checkpoint.tensor(&names.dense(role), &shape)?.dtype);
            }
            DTypeRecord::v1(
                all,
                if experts == ExpertsMode::F16 {
                    Vec::new()
                } else {
                    routed
                },
            )
        }
        (None, None) => DTypeRecord::v1(Vec::new(), Vec::new()),
    };
    if activations == Activations::F32 {
        record.activation = DType::F32;
    }
    Ok(record)
}

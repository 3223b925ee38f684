//! C1 and C2: the host store is complete, its source is closed, and nothing can write to it.
#![expect(
    unsafe_code,
    reason = "one test writes where no safe code can, in a child process that dies of it"
)]

mod model;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use horizon_cache::{HostRecords, HostStore, Policy, ResidentV1};
use horizon_core::artifact::manifest::{
    DTypeRecord, FORMAT, LayerError, Manifest, QuantizerRecord, SourceFile, SourceIdentity, VERSION,
};
use horizon_core::artifact::reader::OpenShards;
use horizon_core::artifact::writer::{ArtifactWriter, TensorPlan};
use horizon_core::artifact::{Artifact, Check, Digest};
use horizon_core::cpu::FastCpu;
use horizon_core::cpu::transport::HostTransport;
use horizon_core::dense::SourceError;
use horizon_core::dtype::{DType, NarrowingReport};
use horizon_core::ids::{ExpertId, LayerId};
use horizon_core::image::{ExpertImage, ExpertSource};
use horizon_core::provider::FullyResident;
use horizon_core::qpacked::{BlockSize, Quantizer};
use horizon_core::record::{ExpertEncoding, RecordLayout};
use horizon_core::spec::ModelSpec;
use horizon_core::synthetic::RandomWeights;
use model::{Model, spec};

const SEED: u64 = 21;
const ENCODING: ExpertEncoding = ExpertEncoding::Qpacked {
    block: BlockSize::B32,
};

fn store(model: &Model) -> HostStore {
    HostStore::new(model.image.clone(), model.spec.moe_layers().collect())
}

/// Every record of the store is the tiled form of what the source gives for that expert.
fn assert_complete(model: &Model, store: &HostStore) {
    let layout = RecordLayout::new(&model.spec, ENCODING).expect("there are experts");
    let tiling = FastCpu::tiling();
    for (row, layer) in model.spec.moe_layers().enumerate() {
        for e in 0..8 {
            let mut canonical = vec![0xA5; layout.bytes];
            ExpertSource::read(&RandomWeights(SEED), layer, ExpertId(e), &layout, &mut canonical)
                .expect("random weights are always there");
            let mut want = vec![0; tiling.tiled_bytes(&layout)];
            tiling.tile(&layout, &canonical, &mut want);
            assert!(store.record(row, ExpertId(e)) == want, "{layer}, expert {e}");
        }
    }
}

#[test]
fn c01_the_store_holds_every_expert_before_and_after_serving() {
    let model = Model::new(spec(64, 8, 2, 72), BlockSize::B32, SEED);
    assert_complete(&model, &store(&model));
    // Complete also when every expert fits on the device, and unchanged by what is served.
    for capacity in [2, 8] {
        let geometry = model.geometry(capacity, 2);
        let record = model.image.record_bytes();
        let slots = Arc::new(HostTransport::new(geometry.slots(), 1, record).expect("memory"));
        let cache = ResidentV1::new(geometry, Policy::Lru, Arc::new(store(&model)), slots.clone());
        let before = store(&model).identity();
        model.serve(slots, Arc::new(cache.expect("sets up"))).text();
        assert_complete(&model, &store(&model));
        assert_eq!(store(&model).identity(), before, "C2: identity");
    }
}

#[test]
fn c02_the_identity_is_that_of_the_records_in_their_order() {
    let model = Model::new(spec(64, 8, 2, 72), BlockSize::B32, SEED);
    let store = store(&model);
    let records = (0..2).flat_map(|row| (0..8).map(move |e| (row, ExpertId(e))));
    let digests: Vec<[u8; 32]> = records
        .map(|(row, e)| Digest::of(store.record(row, e)).0)
        .collect();
    assert_eq!(store.identity(), Digest::of(digests.as_flattened()));
    let other = Model::new(spec(64, 8, 2, 72), BlockSize::B32, SEED + 1);
    assert_ne!(
        store.identity(),
        HostStore::new(other.image, other.spec.moe_layers().collect()).identity()
    );
}

/// Argument by which this program knows that it is the child.
const CHILD: &str = "child-that-";

fn child(deed: &str) -> std::process::ExitStatus {
    let test = "c02_a_write_to_the_store_kills_the_process";
    Command::new(std::env::current_exe().expect("a running program"))
        .args(["--exact", test, &format!("{CHILD}{deed}")])
        .output()
        .expect("the child starts")
        .status
}

#[test]
#[cfg(unix)]
fn c02_a_write_to_the_store_kills_the_process() {
    use std::os::unix::process::ExitStatusExt;

    let deed = std::env::args().find_map(|a| a.strip_prefix(CHILD).map(str::to_owned));
    if let Some(deed) = deed {
        let model = Model::new(spec(64, 8, 2, 72), BlockSize::B32, SEED);
        let store = store(&model);
        let record = store.record(1, ExpertId(7));
        let last = record.as_ptr().wrapping_add(record.len() - 1).cast_mut();
        // SAFETY: there is no excuse for the write; this process exists to be ended by it before any code could see
        // the byte. The read is of a byte that `record` borrows.
        unsafe {
            if deed == "writes" {
                last.write_volatile(!last.read_volatile());
            } else {
                last.read_volatile();
            }
        }
        return;
    }
    assert!(child("reads").success(), "the child's other steps are sound");
    // A segmentation fault, or what macOS calls it.
    let signal = child("writes").signal();
    assert!(matches!(signal, Some(11 | 10)), "{signal:?}");
}

/// An artifact whose tensors are whole canonical records.
fn write_artifact(dest: &Path, spec: &ModelSpec, layout: &RecordLayout) {
    let names: Vec<(LayerId, ExpertId)> = spec
        .moe_layers()
        .flat_map(|l| (0..8).map(move |e| (l, ExpertId(e))))
        .collect();
    let plan = names.iter().map(|(l, e)| TensorPlan {
        name: tensor(*l, *e),
        dtype: DType::U8,
        shape: vec![layout.bytes],
    });
    let writer = ArtifactWriter::create(dest, false, vec![plan.collect()]).expect("begins");
    for (i, (l, e)) in names.iter().enumerate() {
        let mut record = vec![0; layout.bytes];
        ExpertSource::read(&RandomWeights(SEED), *l, *e, layout, &mut record).expect("always there");
        let mut out = writer.tensor(0, i);
        out.write(&record).expect("writes");
        out.finish().expect("ends");
    }
    let manifest = Manifest {
        manifest_sha256: Digest::default(),
        format: FORMAT.into(),
        version: VERSION,
        model: spec.clone(),
        quantizer: QuantizerRecord {
            qpacked_version: 1,
            method: Quantizer::Absmax,
            block: BlockSize::B32,
        },
        dtypes: DTypeRecord::v1(vec![DType::F32; 3], vec![DType::F32]),
        narrowing: NarrowingReport::default(),
        quantization_error: spec
            .moe_layers()
            .map(|layer| LayerError {
                layer,
                squared_error: 0.0,
                squared_norm: 1.0,
            })
            .collect(),
        source: SourceIdentity {
            config_sha256: Digest::default(),
            content_sha256: Digest::default(),
            files: vec![SourceFile {
                name: "model.safetensors".into(),
                bytes: 1,
                header_sha256: Digest::default(),
            }],
        },
        files: Vec::new(),
        shards: Vec::new(),
    };
    writer.publish(manifest).expect("publishes");
}

fn tensor(layer: LayerId, expert: ExpertId) -> String {
    format!("{}.{}", layer.0, expert.0)
}

struct Records<'a>(OpenShards<'a>);

impl ExpertSource for Records<'_> {
    fn read(
        &self,
        layer: LayerId,
        expert: ExpertId,
        _: &RecordLayout,
        out: &mut [u8],
    ) -> Result<NarrowingReport, SourceError> {
        self.0
            .read(&tensor(layer, expert), out, Check::Sha256)
            .map_err(|e| SourceError(Box::new(e)))?;
        Ok(NarrowingReport::default())
    }
}

/// What this process has open or mapped that lies under `dir`.
#[cfg(target_os = "linux")]
fn references(dir: &Path) -> Vec<String> {
    let dir = fs::canonicalize(dir).expect("exists");
    let open = fs::read_dir("/proc/self/fd").expect("this is Linux");
    let open = open
        .flatten()
        .filter_map(|e| fs::read_link(e.path()).ok())
        .filter(|p| p.starts_with(&dir))
        .map(|p| p.display().to_string());
    let maps = fs::read_to_string("/proc/self/maps").expect("this is Linux");
    let maps = maps
        .lines()
        .filter(|l| l.contains(&*dir.to_string_lossy()))
        .map(str::to_owned);
    open.chain(maps).collect()
}

#[test]
fn c01_the_artifact_is_closed_and_may_go_while_serving_goes_on() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let place = dir.path().join("m.hz");
    let spec = spec(64, 8, 2, 72);
    let layout = RecordLayout::new(&spec, ENCODING).expect("there are experts");
    write_artifact(&place, &spec, &layout);

    let artifact = Artifact::open(&place).expect("opens");
    let shards = artifact.open_shards().expect("opens");
    #[cfg(target_os = "linux")]
    assert!(!references(&place).is_empty(), "an open shard is seen");
    let image = ExpertImage::load(&spec, &layout, FastCpu::tiling(), &Records(shards)).expect("loads");
    #[cfg(target_os = "linux")]
    assert_eq!(references(&place), Vec::<String>::new());

    let model = Model::of(spec, ENCODING, image, SEED);
    assert_complete(&model, &store(&model));
    let everything = Arc::new(FullyResident::new(model.image.clone()));
    let want = model.serve(model.image.clone(), everything).text();
    let geometry = model.geometry(2, 2);
    let record = model.image.record_bytes();
    let slots = Arc::new(HostTransport::new(geometry.slots(), 1, record).expect("memory"));
    let cache = ResidentV1::new(geometry, Policy::Lru, Arc::new(store(&model)), slots.clone());
    let mut served = model.serve(slots, Arc::new(cache.expect("sets up")));
    assert_eq!(served.text().difference(&want), None);
    fs::remove_dir_all(&place).expect("nothing holds it");
    assert_eq!(served.text().difference(&want), None, "without the artifact");
}

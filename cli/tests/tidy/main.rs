//! Rules of the project that a test can hold. `docs/STYLE.md` says why each is there.

mod rules;
mod source;

use std::path::Path;

use source::SourceFile;

/// Files that may hold `unsafe`, each with a lint expectation that says why.
const UNSAFE: &[&str] = &[
    "cache/tests/host_store.rs",
    "cache/tests/watched/mod.rs",
    "core/src/cpu/simd/avx2.rs",
    "core/src/cpu/simd/avx512.rs",
    "core/src/cpu/transport.rs",
    "core/src/qpacked/dispatch.rs",
    "kernels-cuda/src/arena.rs",
    "kernels-cuda/src/backend.rs",
    "kernels-cuda/src/bandwidth.rs",
    "kernels-cuda/src/bin/cuda-report/time.rs",
    "kernels-cuda/src/bin/horizon-kernels/nvrtc.rs",
    "kernels-cuda/src/driver/cuda/api.rs",
    "kernels-cuda/src/driver/cuda/handles.rs",
    "kernels-cuda/src/driver/cuda/mod.rs",
    "kernels-cuda/src/driver/emulated/ffi.rs",
    "kernels-cuda/src/driver/emulated/mod.rs",
    "kernels-cuda/src/driver/emulated/tests.rs",
    "kernels-cuda/src/driver/mod.rs",
    "kernels-cuda/src/model.rs",
    "kernels-cuda/src/transport.rs",
    "kernels-cuda/src/weights.rs",
    "kernels-cuda/src/workspace.rs",
    "kernels-cuda/tests/common/mod.rs",
];

fn project() -> Vec<SourceFile> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let tree = source::tree(&root);
    assert!(
        tree.iter().any(|f| f.path == "core/src/lib.rs"),
        "the tree was not found"
    );
    tree
}

/// Fails with every finding of `rule` on every file.
fn each_file(rule: impl Fn(&SourceFile) -> rules::Findings) {
    none(project().iter().flat_map(rule).collect());
}

fn none(findings: rules::Findings) {
    assert!(findings.is_empty(), "{}", findings.join("\n"));
}

#[test]
fn dependencies_point_one_way() {
    each_file(rules::arrows);
}

#[test]
fn files_and_functions_are_short() {
    each_file(rules::lengths);
}

#[test]
fn the_environment_is_read_in_its_places() {
    each_file(rules::environment);
}

#[test]
fn nothing_unfinished_is_left() {
    each_file(rules::markers);
}

#[test]
fn no_machine_is_named() {
    each_file(rules::machine_paths);
}

#[test]
fn unsafe_code_stays_in_its_files() {
    none(rules::unsafe_code(&project(), UNSAFE));
}

#[test]
fn the_tree_is_small() {
    none(rules::tree_size(&project()));
}

#[test]
fn every_file_is_compiled() {
    none(rules::dead_files(&project()));
}

/// Each rule, shown a good file and a bad one.
mod seen_to_fail {
    use super::rules;
    use super::source::{SourceFile, blank, functions, ignored};

    type Rule = fn(&SourceFile) -> rules::Findings;

    #[track_caller]
    fn check(rule: Rule, path: &str, good: &str, bad: &[&str]) {
        assert_eq!(rule(&SourceFile::made_up(path, good)), Vec::<String>::new());
        for text in bad {
            assert_eq!(rule(&SourceFile::made_up(path, text)).len(), 1, "{text}");
        }
    }

    #[test]
    fn arrows() {
        let cargo = |rest: &str| format!("[package]\nname = \"x\"\n[lints]\nworkspace = true\n{rest}");
        check(
            rules::arrows,
            "models/Cargo.toml",
            &cargo("[dependencies]\nhorizon-core.workspace = true\ntokenizers = \"1\"\n"),
            &[
                &cargo("[dependencies]\nhorizon-runtime.workspace = true\n"),
                &cargo("[dev-dependencies]\nhorizon-cache = { path = \"../cache\" }\n"),
                &cargo("[target.'cfg(unix)'.dependencies]\nhorizon-server = \"1\"\n"),
                &cargo("[dependencies.horizon-cli]\npath = \"../cli\"\n"),
                &cargo("[dependencies]\ncore2 = { package = \"horizon-evidence\", path = \"x\" }\n"),
                &cargo("[dependencies]\nclap.workspace = true\n"),
                "[dependencies]\n",
            ],
        );
        check(rules::arrows, "Cargo.toml", "[workspace]\n", &[]);
        assert_eq!(
            rules::arrows(&SourceFile::made_up("extra/Cargo.toml", &cargo(""))).len(),
            1
        );
        for (folder, allowed) in rules::ARROWS {
            assert!(!allowed.contains(folder) && !allowed.contains(&"benches") && !allowed.contains(&"fuzz"));
        }
    }

    #[test]
    fn lengths() {
        let function = |lines: usize| format!("fn f() {{\n{}}}\n", "    g();\n".repeat(lines - 2));
        let file = |lines: usize| "// x\n".repeat(lines);
        check(
            rules::lengths,
            "a.rs",
            &format!("{}{}", function(80), file(520)),
            &[
                &function(81),
                &file(601),
                &format!("impl A {{\n{}}}", function(90)),
            ],
        );
        // A list of cases in a test may be long.
        check(rules::lengths, "a/tests/b.rs", &function(90), &[&file(601)]);
        let tricky = "fn a(x: [u8; 2]) -> u8 { '{'; \"}\"; r#\"}\"#; x[0] /* } */ }\ntrait T { fn b(); }\nfn c<'a>() {\n}";
        assert_eq!(
            functions(&blank(tricky)),
            [("a".into(), 1, 1), ("c".into(), 3, 4)]
        );
    }

    #[test]
    fn environment() {
        let reads = [
            "std::env::var(\"A\")",
            "env::var_os(x)",
            "use std::env::{var};",
            "option_env!(\"A\")",
        ];
        let good = "env!(\"CARGO_PKG_VERSION\"); // env::var\n\"env::var\"";
        check(rules::environment, "core/src/lib.rs", good, &reads);
        check(rules::environment, "cli/src/args.rs", reads[0], &[]);
        check(rules::environment, "core/tests/a.rs", reads[0], &[]);
    }

    #[test]
    fn markers() {
        let bad = [
            "to|do!()",
            "fn a() { unimple|mented!() }",
            "db|g!(1)",
            "// FIX|ME",
            "// TO|DO later",
            "#[ig|nore]",
        ];
        let bad: Vec<String> = bad.iter().map(|b| b.replace('|', "")).collect();
        let bad: Vec<&str> = bad.iter().map(String::as_str).collect();
        check(rules::markers, "a.rs", "fn a() { not_a_todo(); }", &bad);
        check(rules::markers, "a.md", "nothing", &bad[3..4]);
    }

    #[test]
    fn machine_paths() {
        let bad = [
            "see /wo|rk/x",
            "\"/ho|me/me\"",
            "cd /ro|ot/a",
            "C:\\Use|rs\\me",
            "../sha|red/x",
        ];
        let bad: Vec<String> = bad.iter().map(|b| b.replace('|', "")).collect();
        let bad: Vec<&str> = bad.iter().map(String::as_str).collect();
        check(rules::machine_paths, "a.md", "framework/lib and artwork/x", &bad);
    }

    #[test]
    fn unsafe_code() {
        let files = [
            SourceFile::made_up("a.rs", "fn f() { unsafe { g() } }"),
            SourceFile::made_up("b.rs", "#![deny(unsafe_code)] // unsafe\n\"unsafe\""),
        ];
        assert!(rules::unsafe_code(&files, &["a.rs"]).is_empty());
        assert_eq!(rules::unsafe_code(&files, &[]).len(), 1);
        assert_eq!(rules::unsafe_code(&files, &["a.rs", "b.rs", "c.rs"]).len(), 2);
    }

    #[test]
    fn tree_size() {
        let mut files = [SourceFile::made_up("a", ""), SourceFile::made_up("b", "")];
        files[0].bytes = rules::TREE_BYTES - 1;
        assert!(rules::tree_size(&files).is_empty());
        files[1].bytes = 1;
        assert_eq!(rules::tree_size(&files).len(), 1);
    }

    #[test]
    fn dead_files() {
        let tree = |last: &str| {
            [
                (
                    "a/src/lib.rs",
                    "mod b;\npub(crate) mod c;\n#[path = \"odd.rs\"]\nmod d;\nmod e { }",
                ),
                ("a/src/b.rs", "mod inner;"),
                ("a/src/b/inner.rs", ""),
                ("a/src/c/mod.rs", "mod deep;"),
                ("a/src/c/deep.rs", ""),
                ("a/src/odd.rs", ""),
                ("a/tests/t.rs", "mod common;"),
                ("a/tests/common/mod.rs", ""),
                ("a/tests/big/main.rs", "mod part;\nmod two;"),
                ("a/tests/big/part.rs", ""),
                ("a/tests/big/two.rs", "#[path = \"../../src/far.rs\"]\nmod far;"),
                ("a/src/far.rs", ""),
                ("a/build.rs", ""),
                (last, ""),
            ]
            .map(|(path, text)| SourceFile::made_up(path, text))
        };
        assert_eq!(rules::dead_files(&tree("a/src/main.rs")), Vec::<String>::new());
        for dead in [
            "a/src/x.rs",
            "a/src/b/x.rs",
            "a/tests/common/x.rs",
            "a/tests/big/x.rs",
            "a/src/e.rs",
        ] {
            assert_eq!(rules::dead_files(&tree(dead)).len(), 1, "{dead}");
        }
    }

    #[test]
    fn ignore_patterns() {
        let patterns = ["/target/", "/target-*/", "*.hz/"];
        for (path, is_dir, want) in [
            ("target", true, true),
            ("target", false, false),
            ("a/target", true, false),
            ("target-x", true, true),
            ("a/m.hz", true, true),
            ("m.hzx", true, false),
        ] {
            assert_eq!(ignored(path, is_dir, &patterns), want, "{path}");
        }
    }
}

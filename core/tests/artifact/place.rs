//! Where artifacts appear: complete or not at all, one writer at a time, nothing of somebody else's removed.

use super::*;

/// A writer in the middle of its work.
fn unfinished(dest: &Path, force: bool) -> ArtifactWriter {
    let mut writer = ArtifactWriter::create(dest, force, plan()).expect("a place to write");
    writer.small_file("config.json", b"{}").expect("written");
    writer.tensor(0, 0).write(&[1, 2, 3]).expect("written");
    writer
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .expect("a directory")
        .map(|e| e.expect("an entry").file_name().into_string().expect("UTF-8"))
        .collect();
    names.sort();
    names
}

#[test]
fn an_unfinished_writer_leaves_nothing() {
    let (dir, dest) = scratch();
    let writer = unfinished(&dest, false);
    assert_eq!(names(dir.path()), ["m.hz.partial"]);
    drop(writer);
    assert_eq!(names(dir.path()), Vec::<String>::new());
}

#[test]
fn an_artifact_is_replaced_only_by_force_and_only_at_the_end() {
    let (dir, dest) = scratch();
    write(&dest, false, 64).expect("written");
    let before = files_in(&dest);
    let error = write(&dest, false, 64).expect_err("exists").to_string();
    assert!(error.contains("--force"), "{error}");
    let writer = unfinished(&dest, true);
    assert_eq!(files_in(&dest), before);
    drop(writer);
    assert_eq!(files_in(&dest), before);
    assert_eq!(names(dir.path()), ["m.hz"]);
    fs::write(dest.join("extra"), b"x").expect("write");
    write(&dest, true, 64).expect("replaced");
    assert_eq!(files_in(&dest), before);
    assert_eq!(names(dir.path()), ["m.hz"]);
}

#[test]
fn what_is_no_artifact_is_never_replaced() {
    let (dir, dest) = scratch();
    fs::write(&dest, b"a file").expect("write");
    assert!(matches!(write(&dest, true, 64), Err(WriteError::Foreign(_))));
    fs::remove_file(&dest).expect("remove");
    fs::create_dir(&dest).expect("create");
    fs::write(dest.join("thesis.txt"), b"mine").expect("write");
    assert!(matches!(write(&dest, true, 64), Err(WriteError::Foreign(_))));
    fs::remove_file(dest.join("thesis.txt")).expect("remove");
    write(&dest, false, 64).expect("an empty directory is as good as none");
    assert_eq!(names(dir.path()), ["m.hz"]);

    let other = dir.path().join("n.hz");
    fs::create_dir(dir.path().join("n.hz.partial")).expect("create");
    fs::write(dir.path().join("n.hz.partial/thesis.txt"), b"mine").expect("write");
    assert!(matches!(
        write(&other, true, 64),
        Err(WriteError::ForeignPartial(_))
    ));
    assert_eq!(names(dir.path()), ["m.hz", "n.hz.partial"]);
    assert!(matches!(
        write(&dir.path().join("no/such"), false, 64),
        Err(WriteError::NoParent { .. })
    ));
    assert!(matches!(
        write(Path::new("/"), false, 64),
        Err(WriteError::NoName(_))
    ));
}

#[test]
fn one_writer_at_a_time() {
    let (dir, dest) = scratch();
    let writer = unfinished(&dest, false);
    let inside = files_in(&dir.path().join("m.hz.partial"));
    assert!(matches!(write(&dest, true, 64), Err(WriteError::Busy(_))));
    assert_eq!(files_in(&dir.path().join("m.hz.partial")), inside);
    drop(writer);
    write(&dest, false, 64).expect("the place is free again");
}

#[test]
fn what_a_killed_run_left_is_removed_with_a_note() {
    let (dir, dest) = scratch();
    // The files of a run that was killed: the lock went with its process.
    let partial = dir.path().join("m.hz.partial");
    let writer = unfinished(&dest, false);
    let left = files_in(&partial);
    drop(writer);
    fs::create_dir(&partial).expect("create");
    for (name, bytes) in &left {
        fs::write(partial.join(name), bytes).expect("write");
    }
    let (_, notes) = write(&dest, false, 64).expect("written");
    assert_eq!(notes.len(), 1, "{notes:?}");
    assert!(
        notes[0].contains("m.hz.partial") && notes[0].contains("did not finish"),
        "{notes:?}"
    );
    assert_eq!(names(dir.path()), ["m.hz"]);
    verify(&dest, &Silent).expect("sound");
}

#[test]
fn a_run_killed_between_the_two_renames_is_undone() {
    let (dir, dest) = scratch();
    write(&dest, false, 64).expect("written");
    let before = files_in(&dest);
    let replaced = dir.path().join("m.hz.replaced");
    fs::rename(&dest, &replaced).expect("rename");
    // The next run finds the old artifact again, and leaves it alone without --force.
    assert!(matches!(write(&dest, false, 64), Err(WriteError::Exists(_))));
    assert_eq!(files_in(&dest), before);
    assert_eq!(names(dir.path()), ["m.hz"]);
    // Killed after the second rename: the new artifact stands, the old one goes.
    fs::create_dir(&replaced).expect("create");
    fs::write(replaced.join(MANIFEST_FILE), b"old").expect("write");
    let (_, notes) = write(&dest, true, 64).expect("written");
    assert!(notes[0].contains("m.hz.replaced"), "{notes:?}");
    assert_eq!(names(dir.path()), ["m.hz"]);
}

#[test]
fn a_full_disk_and_a_closed_directory_say_what_to_do() {
    let at = |kind: std::io::ErrorKind| WriteError::io(Path::new("out/m.hz"))(kind.into()).to_string();
    assert!(at(std::io::ErrorKind::StorageFull).contains("out/m.hz: no space left"));
    assert!(at(std::io::ErrorKind::ReadOnlyFilesystem).contains("choose another output"));
    assert!(at(std::io::ErrorKind::PermissionDenied).contains("choose another output"));
}

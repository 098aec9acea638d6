//! Shared memory that clients have registered: objects of POSIX shared memory, by name.
//!
//! Nothing is mapped. A client may shorten its object at any time, and whoever touches a mapping
//! of bytes that are gone is killed (SIGBUS). So bytes are read and written by system calls.
//!
//! **Invariant:** only bytes inside of a region are read or written, and a region is as long as it
//! was in its object when it was registered. A write does not lengthen an object.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::{Arc, Mutex};

use pleach_transport::mutex::lock;
use rustix::fs::OFlags;

use super::messages::system_shared_memory_status_response::RegionStatus;
use super::{InferenceError, shown};

/// The most regions at a time: each is an open file.
pub const REGIONS_MAX: usize = 256;

/// The longest name of a region, in bytes.
const NAME_BYTES_MAX: usize = 256;

/// The longest name of an object, in bytes: that of a file.
const KEY_BYTES_MAX: usize = 255;

/// Where the system has the objects.
const FOLDER: &str = "/dev/shm";

/// Some bytes of a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionSlice {
    /// The region's name.
    pub region: String,
    /// Where they begin in the region.
    pub offset: u64,
    /// How many.
    pub bytes: u64,
}

struct Region {
    key: String,
    offset: u64,
    bytes: u64,
    file: Arc<File>,
}

/// The regions of all clients; any thread may use them.
#[derive(Default)]
pub struct SharedRegions {
    regions: Mutex<BTreeMap<String, Region>>,
}

impl std::fmt::Debug for SharedRegions {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "SharedRegions({})", lock(&self.regions).len())
    }
}

impl SharedRegions {
    /// Registers `bytes` bytes from `offset` on of the object `key`.
    ///
    /// # Errors
    ///
    /// [`InferenceError`]: the object is not there, is too short, or is no memory; the name is
    /// taken; or there are [`REGIONS_MAX`] regions.
    pub fn register(&self, name: &str, key: &str, offset: u64, bytes: u64) -> Result<(), InferenceError> {
        let invalid = |reason: &str| {
            InferenceError::Invalid(format!("the region {} is not registered: {reason}", shown(name)))
        };
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            return Err(invalid(&format!("its name has 1 to {NAME_BYTES_MAX} bytes")));
        }
        let file = open(key).map_err(|reason| invalid(&format!("its key {} {reason}", shown(key))))?;
        let metadata = file.metadata().map_err(|error| invalid(&error.to_string()))?;
        if !metadata.is_file() {
            return Err(invalid(&format!("its key {} is no shared memory", shown(key))));
        }
        let end = offset.checked_add(bytes).filter(|end| *end <= metadata.len());
        if bytes == 0 || end.is_none() {
            let have = metadata.len();
            let text = format!("{bytes} bytes from {offset} on do not lie in an object of {have} bytes");
            return Err(invalid(&text));
        }
        let mut regions = lock(&self.regions);
        if regions.contains_key(name) {
            let text = format!("there is a region {}; unregister it before", shown(name));
            return Err(InferenceError::Exists(text));
        }
        if regions.len() >= REGIONS_MAX {
            let text = format!("there are {REGIONS_MAX} regions, and no more may be; unregister some");
            return Err(InferenceError::Full(text));
        }
        let region = Region { key: key.to_owned(), offset, bytes, file: Arc::new(file) };
        regions.insert(name.to_owned(), region);
        Ok(())
    }

    /// Forgets a region, or all of them if the name is empty. None of this name is no error.
    pub fn unregister(&self, name: &str) {
        let mut regions = lock(&self.regions);
        if name.is_empty() { regions.clear() } else { drop(regions.remove(name)) }
    }

    /// The region of this name, or all of them if the name is empty.
    ///
    /// # Errors
    ///
    /// [`InferenceError::NotFound`].
    pub fn status(&self, name: &str) -> Result<Vec<RegionStatus>, InferenceError> {
        let status = |(name, region): (&String, &Region)| RegionStatus {
            name: name.clone(),
            key: region.key.clone(),
            offset: region.offset,
            byte_size: region.bytes,
        };
        let regions = lock(&self.regions);
        if name.is_empty() {
            return Ok(regions.iter().map(status).collect());
        }
        let one = regions.get_key_value(name).ok_or_else(|| not_found(name))?;
        Ok(vec![status(one)])
    }

    /// The file of a slice, and where the slice begins there.
    ///
    /// # Errors
    ///
    /// [`InferenceError`]: there is no such region, or the slice is not inside.
    fn find(&self, slice: &RegionSlice) -> Result<(Arc<File>, u64), InferenceError> {
        let regions = lock(&self.regions);
        let RegionSlice { region: name, offset, bytes } = slice;
        let region = regions.get(name).ok_or_else(|| not_found(name))?;
        let end = offset.checked_add(*bytes).filter(|end| *end <= region.bytes);
        if end.is_none() {
            let (have, name) = (region.bytes, shown(name));
            let text =
                format!("{bytes} bytes from {offset} on do not lie in the region {name} of {have} bytes");
            return Err(InferenceError::Invalid(text));
        }
        // Both are inside of the object.
        Ok((region.file.clone(), region.offset + offset))
    }

    /// Checks that a slice lies in its region.
    ///
    /// # Errors
    ///
    /// [`InferenceError`]: there is no such region, or the slice is not inside.
    pub fn check(&self, slice: &RegionSlice) -> Result<(), InferenceError> {
        self.find(slice).map(drop)
    }

    /// The bytes of a slice.
    ///
    /// # Errors
    ///
    /// [`InferenceError`]: the slice is not inside of its region, or the client has shortened the
    /// object.
    pub fn read(&self, slice: &RegionSlice) -> Result<Vec<u8>, InferenceError> {
        let (file, at) = self.find(slice)?;
        check_length(&file, at, slice)?;
        // The object has so many bytes, so no request alone decides what is allocated.
        let mut bytes = vec![0; slice.bytes as usize];
        file.read_exact_at(&mut bytes, at).map_err(|error| failed(slice, "read", &error))?;
        Ok(bytes)
    }

    /// Writes to a slice. `bytes` has its length.
    ///
    /// # Errors
    ///
    /// As [`SharedRegions::read`].
    pub fn write(&self, slice: &RegionSlice, bytes: &[u8]) -> Result<(), InferenceError> {
        let (file, at) = self.find(slice)?;
        check_length(&file, at, slice)?;
        file.write_all_at(bytes, at).map_err(|error| failed(slice, "written", &error))
    }
}

fn not_found(name: &str) -> InferenceError {
    InferenceError::NotFound(format!("there is no region {}; register it before", shown(name)))
}

fn failed(slice: &RegionSlice, action: &str, error: &std::io::Error) -> InferenceError {
    let name = shown(&slice.region);
    InferenceError::Invalid(format!("the region {name} is not {action} ({error}); look at its shared memory"))
}

fn check_length(file: &File, at: u64, slice: &RegionSlice) -> Result<(), InferenceError> {
    let have = file.metadata().map_err(|error| failed(slice, "there", &error))?.len();
    if have >= at + slice.bytes {
        return Ok(());
    }
    let name = shown(&slice.region);
    let text =
        format!("the shared memory of the region {name} was shortened to {have} bytes; register it again");
    Err(InferenceError::Invalid(text))
}

/// Opens an object. Only its own name counts, no path.
fn open(key: &str) -> Result<File, String> {
    let name = key.strip_prefix('/').unwrap_or(key);
    if name.is_empty() || name.len() > KEY_BYTES_MAX || name.starts_with('.') || name.contains(['/', '\0']) {
        return Err("is no name of POSIX shared memory, such as /mine".to_owned());
    }
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(flags.bits().cast_signed());
    options.open(Path::new(FOLDER).join(name)).map_err(|error| format!("is not opened ({error})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An object of shared memory that goes away with the test.
    struct Object(String);

    impl Object {
        fn new(name: &str, bytes: u64) -> (Self, File) {
            let key = format!("/pleach-test-{name}-{}", std::process::id());
            let path = format!("{FOLDER}{key}");
            let file = OpenOptions::new().read(true).write(true).create_new(true).open(path);
            let file = file.expect("there is shared memory");
            file.set_len(bytes).expect("there is room");
            (Self(key), file)
        }
    }

    impl Drop for Object {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(format!("{FOLDER}{}", self.0));
        }
    }

    fn slice(region: &str, offset: u64, bytes: u64) -> RegionSlice {
        RegionSlice { region: region.to_owned(), offset, bytes }
    }

    #[test]
    fn a_region_is_read_and_written_where_it_lies_in_its_object() {
        let (object, file) = Object::new("inside", 100);
        let regions = SharedRegions::default();
        regions.register("r", &object.0, 10, 50).expect("it is inside");
        regions.write(&slice("r", 5, 3), b"abc").expect("it is inside");
        let mut seen = [0; 5];
        file.read_exact_at(&mut seen, 14).expect("it is there");
        assert_eq!(&seen, b"\0abc\0");
        assert_eq!(regions.read(&slice("r", 5, 3)).as_deref(), Ok(&b"abc"[..]));
        let status = regions.status("r").expect("it is there");
        assert_eq!((status[0].offset, status[0].byte_size), (10, 50));
        for (offset, bytes) in [(0, 51), (50, 1), (u64::MAX, 1), (1, u64::MAX)] {
            let error = regions.read(&slice("r", offset, bytes)).expect_err("it is outside");
            assert!(error.to_string().contains("do not lie in the region \"r\" of 50 bytes"), "{error}");
        }
        regions.unregister("r");
        assert!(matches!(regions.read(&slice("r", 0, 1)), Err(InferenceError::NotFound(_))));
    }

    #[test]
    fn an_object_that_is_shortened_later_is_an_error_and_stays_short() {
        let (object, file) = Object::new("shortened", 8192);
        let regions = SharedRegions::default();
        regions.register("r", &object.0, 0, 8192).expect("it is inside");
        file.set_len(4096).expect("it is ours");
        for result in
            [regions.read(&slice("r", 0, 8192)).map(drop), regions.write(&slice("r", 4000, 200), &[1; 200])]
        {
            let error = result.expect_err("bytes are gone").to_string();
            assert!(error.contains("was shortened to 4096 bytes"), "{error}");
        }
        assert_eq!(file.metadata().expect("it is there").len(), 4096);
        assert!(regions.read(&slice("r", 0, 4096)).is_ok());
    }

    #[test]
    fn hostile_registrations_are_refused() {
        let (object, _file) = Object::new("hostile", 64);
        let regions = SharedRegions::default();
        let long = "x".repeat(300);
        let keys = ["", "/", "..", "/../etc/passwd", "/a/b", "a\0b", "/pleach-test-nowhere", &long];
        for key in keys {
            assert!(matches!(regions.register("r", key, 0, 1), Err(InferenceError::Invalid(_))), "{key}");
        }
        for (offset, bytes) in [(0, 65), (64, 1), (u64::MAX, 2), (0, u64::MAX), (0, 0)] {
            let refused = regions.register("r", &object.0, offset, bytes);
            assert!(matches!(refused, Err(InferenceError::Invalid(_))), "{offset} {bytes}");
        }
        assert!(regions.register("", &object.0, 0, 1).is_err());
        assert!(regions.register(&long, &object.0, 0, 1).is_err());
        for number in 0..REGIONS_MAX {
            regions.register(&number.to_string(), &object.0, 0, 64).expect("there is room");
        }
        assert!(matches!(regions.register("0", &object.0, 0, 1), Err(InferenceError::Exists(_))));
        assert!(matches!(regions.register("more", &object.0, 0, 1), Err(InferenceError::Full(_))));
        regions.unregister("");
        assert_eq!(regions.status(""), Ok(Vec::new()));
    }
}

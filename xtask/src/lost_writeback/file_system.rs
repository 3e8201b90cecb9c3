//! A file system in memory that accepts writes and loses some of them at writeback, as a thin volume that is
//! full or a failing disk does.
//!
//! The kernel caches writes (`FUSE_WRITEBACK_CACHE`). A write that the server fails is one that writeback loses:
//! the page stays readable and is no longer dirty, until it is evicted and old bytes come back. The next `fsync`
//! through each open descriptor fails once. Direct writes fail at once.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags, RenameFlags,
    ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use std::sync::Mutex;

use crate::random::Random;

/// Nothing but this mount changes a file.
const TTL: Duration = Duration::from_secs(3600);
/// A larger file is a mistake of the test.
const MOST_FILE_BYTES: u64 = 1 << 30;

#[derive(Debug)]
enum Content {
    Folder(BTreeMap<OsString, u64>),
    File(Vec<u8>),
    Link(PathBuf),
}

#[derive(Debug)]
struct Node {
    content: Content,
    mode: u32,
    links: u32,
    changed: SystemTime,
}

impl Node {
    fn attributes(&self, inode: u64) -> FileAttr {
        let (kind, size) = match &self.content {
            Content::Folder(_) => (FileType::Directory, 0),
            Content::File(bytes) => (FileType::RegularFile, bytes.len() as u64),
            Content::Link(target) => (FileType::Symlink, target.as_os_str().len() as u64),
        };
        FileAttr {
            ino: INodeNo(inode),
            size,
            blocks: size.div_ceil(512),
            atime: self.changed,
            mtime: self.changed,
            ctime: self.changed,
            crtime: self.changed,
            kind,
            perm: (self.mode & 0o7777) as u16,
            nlink: self.links,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

/// All inodes by their numbers; the first is the root.
#[derive(Debug)]
struct Inodes {
    all: Vec<Node>,
    random: Random,
}

impl Inodes {
    fn get(&mut self, inode: INodeNo) -> Result<&mut Node, Errno> {
        let index = u64::from(inode).checked_sub(1).ok_or(Errno::ENOENT)?;
        self.all.get_mut(index as usize).ok_or(Errno::ENOENT)
    }

    fn folder(&mut self, inode: INodeNo) -> Result<&mut BTreeMap<OsString, u64>, Errno> {
        match &mut self.get(inode)?.content {
            Content::Folder(names) => Ok(names),
            _ => Err(Errno::ENOTDIR),
        }
    }

    fn bytes(&mut self, inode: INodeNo) -> Result<&mut Vec<u8>, Errno> {
        match &mut self.get(inode)?.content {
            Content::File(bytes) => Ok(bytes),
            _ => Err(Errno::EISDIR),
        }
    }

    fn find(&mut self, parent: INodeNo, name: &OsStr) -> Result<FileAttr, Errno> {
        let found = self.folder(parent)?.get(name).copied();
        let inode = found.ok_or(Errno::ENOENT)?;
        Ok(self.get(INodeNo(inode))?.attributes(inode))
    }

    fn add(
        &mut self,
        parent: INodeNo,
        name: &OsStr,
        content: Content,
        mode: u32,
    ) -> Result<FileAttr, Errno> {
        let inode = self.all.len() as u64 + 1;
        let names = self.folder(parent)?;
        if names.contains_key(name) {
            return Err(Errno::EEXIST);
        }
        names.insert(name.to_owned(), inode);
        let node = Node {
            content,
            mode,
            links: 1,
            changed: SystemTime::now(),
        };
        let attributes = node.attributes(inode);
        self.all.push(node);
        Ok(attributes)
    }

    /// Removes a name. An inode without names stays, as descriptors may be open.
    fn remove(&mut self, parent: INodeNo, name: &OsStr) -> Result<u64, Errno> {
        let inode = self.folder(parent)?.remove(name).ok_or(Errno::ENOENT)?;
        let node = self.get(INodeNo(inode))?;
        node.links = node.links.saturating_sub(1);
        Ok(inode)
    }

    fn rename(
        &mut self,
        from: (INodeNo, &OsStr),
        to: (INodeNo, &OsStr),
        flags: RenameFlags,
    ) -> Result<(), Errno> {
        if !(flags - RenameFlags::RENAME_NOREPLACE).is_empty() {
            return Err(Errno::EINVAL);
        }
        let taken = self.folder(to.0)?.contains_key(to.1);
        if taken && flags.contains(RenameFlags::RENAME_NOREPLACE) {
            return Err(Errno::EEXIST);
        }
        let inode = self.folder(from.0)?.get(from.1).copied();
        let inode = inode.ok_or(Errno::ENOENT)?;
        if taken {
            self.remove(to.0, to.1)?;
        }
        self.folder(from.0)?.remove(from.1);
        self.folder(to.0)?.insert(to.1.to_owned(), inode);
        Ok(())
    }

    fn resize(&mut self, inode: INodeNo, len_bytes: u64) -> Result<(), Errno> {
        if len_bytes > MOST_FILE_BYTES {
            return Err(Errno::EFBIG);
        }
        self.bytes(inode)?.resize(len_bytes as usize, 0);
        Ok(())
    }

    fn fallocate(
        &mut self,
        inode: INodeNo,
        offset: u64,
        len_bytes: u64,
        mode: i32,
    ) -> Result<(), Errno> {
        const ZEROES: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE;
        if mode & !(ZEROES | libc::FALLOC_FL_KEEP_SIZE) != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let end = offset.checked_add(len_bytes).ok_or(Errno::EFBIG)?;
        let now = self.bytes(inode)?.len() as u64;
        if mode & libc::FALLOC_FL_KEEP_SIZE == 0 && end > now {
            self.resize(inode, end)?;
        }
        if mode & ZEROES != 0 {
            let bytes = self.bytes(inode)?;
            let end = (end as usize).min(bytes.len());
            let offset = (offset as usize).min(end);
            bytes[offset..end].fill(0);
        }
        Ok(())
    }
}

/// The files, and how many writes are lost.
#[derive(Debug)]
pub struct Tree {
    inodes: Mutex<Inodes>,
    /// One of so many writes is lost; 0: none.
    one_in: AtomicU64,
    lost: AtomicU64,
}

impl Tree {
    fn new(random: Random) -> Tree {
        let root = Node {
            content: Content::Folder(BTreeMap::new()),
            mode: 0o755,
            links: 1,
            changed: SystemTime::now(),
        };
        Tree {
            inodes: Mutex::new(Inodes {
                all: vec![root],
                random,
            }),
            one_in: AtomicU64::new(0),
            lost: AtomicU64::new(0),
        }
    }

    fn with<T>(&self, work: impl FnOnce(&mut Inodes) -> Result<T, Errno>) -> Result<T, Errno> {
        let mut inodes = self.inodes.lock().map_err(|_| Errno::EIO)?;
        work(&mut inodes)
    }

    fn write(&self, inode: INodeNo, offset: u64, data: &[u8]) -> Result<(), Errno> {
        let one_in = self.one_in.load(Ordering::Relaxed);
        self.with(|inodes| {
            if one_in > 0 && inodes.random.below(one_in) == 0 {
                self.lost.fetch_add(1, Ordering::Relaxed);
                return Err(Errno::EIO);
            }
            let end = offset + data.len() as u64;
            if end > inodes.bytes(inode)?.len() as u64 {
                inodes.resize(inode, end)?;
            }
            inodes.bytes(inode)?[offset as usize..end as usize].copy_from_slice(data);
            Ok(())
        })
    }
}

/// What the kernel asks.
struct Server(Arc<Tree>);

impl Filesystem for Server {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        let wanted = InitFlags::FUSE_WRITEBACK_CACHE;
        let refused = |_| std::io::Error::other("the kernel's FUSE has no writeback cache");
        config.add_capabilities(wanted).map_err(refused)
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        entry(self.0.with(|inodes| inodes.find(parent, name)), reply);
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        attributes(&self.0, inode, reply);
    }

    fn setattr(
        &self,
        _: &Request,
        inode: INodeNo,
        mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _created: Option<SystemTime>,
        _changed: Option<SystemTime>,
        _backup: Option<SystemTime>,
        _flags: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let set = self.0.with(|inodes| {
            if let Some(size) = size {
                inodes.resize(inode, size)?;
            }
            let node = inodes.get(inode)?;
            node.mode = mode.unwrap_or(node.mode);
            match mtime {
                Some(TimeOrNow::SpecificTime(time)) => node.changed = time,
                Some(TimeOrNow::Now) => node.changed = SystemTime::now(),
                None => {}
            }
            Ok(())
        });
        match set {
            Ok(()) => attributes(&self.0, inode, reply),
            Err(error) => reply.error(error),
        }
    }

    fn readlink(&self, _: &Request, inode: INodeNo, reply: ReplyData) {
        let target = self.0.with(|inodes| match &inodes.get(inode)?.content {
            Content::Link(target) => Ok(target.as_os_str().as_encoded_bytes().to_vec()),
            _ => Err(Errno::EINVAL),
        });
        data(target, reply);
    }

    fn symlink(&self, _: &Request, parent: INodeNo, name: &OsStr, to: &Path, reply: ReplyEntry) {
        let link = Content::Link(to.to_owned());
        let added = self.0.with(|inodes| inodes.add(parent, name, link, 0o777));
        entry(added, reply);
    }

    fn mkdir(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        reply: ReplyEntry,
    ) {
        let folder = Content::Folder(BTreeMap::new());
        let added = self.0.with(|inodes| inodes.add(parent, name, folder, mode));
        entry(added, reply);
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let removed = self.0.with(|inodes| inodes.remove(parent, name));
        done(removed.map(drop), reply);
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let removed = self.0.with(|inodes| {
            let inode = inodes.find(parent, name)?.ino;
            if !inodes.folder(inode)?.is_empty() {
                return Err(Errno::ENOTEMPTY);
            }
            inodes.remove(parent, name)
        });
        done(removed.map(drop), reply);
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let names = ((parent, name), (new_parent, new_name));
        let renamed = self.0.with(|inodes| inodes.rename(names.0, names.1, flags));
        done(renamed, reply);
    }

    fn link(&self, _: &Request, inode: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let linked = self.0.with(|inodes| {
            let names = inodes.folder(parent)?;
            if names.contains_key(name) {
                return Err(Errno::EEXIST);
            }
            names.insert(name.to_owned(), inode.into());
            let node = inodes.get(inode)?;
            node.links += 1;
            Ok(node.attributes(inode.into()))
        });
        entry(linked, reply);
    }

    fn read(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let bytes = self.0.with(|inodes| {
            let bytes = inodes.bytes(inode)?;
            let start = (offset as usize).min(bytes.len());
            let end = (start + size as usize).min(bytes.len());
            Ok(bytes[start..end].to_vec())
        });
        data(bytes, reply);
    }

    fn write(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.0.write(inode, offset, data) {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(error),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // The cache outlives a close, as on a disk.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE);
    }

    fn readdir(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let listed = self.0.with(|inodes| {
            let names = inodes.folder(inode)?.clone();
            for (at, (name, found)) in (1u64..).zip(names).skip(offset as usize) {
                let kind = inodes.get(INodeNo(found))?.attributes(found).kind;
                if reply.add(INodeNo(found), at, kind, &name) {
                    break;
                }
            }
            Ok(())
        });
        match listed {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let blocks = 1 << 20;
        reply.statfs(blocks, blocks, blocks, blocks, blocks, 4096, 255, 4096);
    }

    fn getxattr(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, reply: ReplyXattr) {
        reply.error(Errno::EOPNOTSUPP);
    }

    fn create(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        let file = Content::File(Vec::new());
        match self.0.with(|inodes| inodes.add(parent, name, file, mode)) {
            Ok(found) => {
                let keeps = FopenFlags::FOPEN_KEEP_CACHE;
                reply.created(&TTL, &found, Generation(0), FileHandle(0), keeps);
            }
            Err(error) => reply.error(error),
        }
    }

    fn fallocate(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let work = |inodes: &mut Inodes| inodes.fallocate(inode, offset, length, mode);
        done(self.0.with(work), reply);
    }
}

fn entry(found: Result<FileAttr, Errno>, reply: ReplyEntry) {
    match found {
        Ok(found) => reply.entry(&TTL, &found, Generation(0)),
        Err(error) => reply.error(error),
    }
}

fn attributes(tree: &Tree, inode: INodeNo, reply: ReplyAttr) {
    let found = tree.with(|inodes| Ok(inodes.get(inode)?.attributes(inode.into())));
    match found {
        Ok(found) => reply.attr(&TTL, &found),
        Err(error) => reply.error(error),
    }
}

fn data(bytes: Result<Vec<u8>, Errno>, reply: ReplyData) {
    match bytes {
        Ok(bytes) => reply.data(&bytes),
        Err(error) => reply.error(error),
    }
}

fn done(result: Result<(), Errno>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}

/// The file system, mounted. It is unmounted when this value is dropped.
pub struct Mounted {
    tree: Arc<Tree>,
    folder: PathBuf,
    session: Option<BackgroundSession>,
}

impl Mounted {
    /// Mounts an empty one.
    pub fn new(folder: &Path, random: Random) -> Result<Mounted> {
        let mut mounted = Mounted {
            tree: Arc::new(Tree::new(random)),
            folder: folder.to_owned(),
            session: None,
        };
        mounted.mount()?;
        Ok(mounted)
    }

    fn mount(&mut self) -> Result<()> {
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("vellum-lost-writeback".to_owned())];
        let server = Server(self.tree.clone());
        let session = fuser::spawn_mount(server, &self.folder, &config);
        self.session = Some(session.context("cannot mount the file system that loses writes")?);
        Ok(())
    }

    /// Loses one of so many writes from now on; 0: none.
    pub fn lose_one_in(&self, writes: u64) {
        self.tree.one_in.store(writes, Ordering::Relaxed);
    }

    /// Writes lost so far.
    pub fn lost(&self) -> u64 {
        self.tree.lost.load(Ordering::Relaxed)
    }

    /// Evicts all cached pages, so that the next reads show what was lost.
    pub fn evict(&self) -> Result<()> {
        let session = self.session.as_ref().context("not mounted")?;
        let count = self.tree.with(|inodes| Ok(inodes.all.len() as u64));
        let count = count.map_err(|_| anyhow::anyhow!("the server has panicked"))?;
        for inode in 1..=count {
            // One that the kernel has never seen has no pages.
            let _ = session.notifier().inval_inode(INodeNo(inode), 0, 0);
        }
        Ok(())
    }

    /// Loses all that is still dirty, and mounts what is left, from where nothing is lost.
    pub fn remount(&mut self) -> Result<()> {
        self.lose_one_in(1);
        if let Some(session) = self.session.take() {
            session.umount_and_join()?;
        }
        self.lose_one_in(0);
        self.mount()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.lose_one_in(0);
        if let Some(session) = self.session.take() {
            // Nothing can be done about one that is busy.
            let _ = session.umount_and_join();
        }
    }
}

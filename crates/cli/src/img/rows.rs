//! Rows of options and operands that several subcommands list.

pub const FORMAT: &str = "-f, --format FMT  the format of FILENAME";
pub const IMAGE_OPTS: &str = "--image-opts  FILENAME is a list of options, not a name \
                                    (excludes --format)";
pub const OBJECT: &str = "--object OBJDEF  an object, such as a secret with a key";
pub const QUIET: &str = "-q, --quiet  print errors only";
pub const PROGRESS: &str = "-p, --progress  show how far it is";
pub const CACHE: &str = "-t, --cache CACHE  cache mode of FILENAME (writeback)";
pub const SHARE: &str = "-U, --force-share  others may write meanwhile";
pub const OUTPUT: &str = "--output human|json  for people (the default) or for programs";
pub const FILENAME: &str = "FILENAME  the image, or its options with --image-opts";
pub const REPOSITORY: &str = "REPOSITORY  a folder, or s3://BUCKET/PREFIX (gs://, az://), or \
                                    json:{\"driver\": \"repository\", ...}";
pub const SOURCE_CACHE: &str = "-T, --cache CACHE_MODE  cache mode of FILENAME (writeback)";
pub const TAG: &str = "TAG[@NUMBER]  the disk's name (latest), and which one of them (the \
                             newest)";
